"""The behaviour that every engine for networks shares; each engine's test subclasses `NetworkContract`.

class TestOnnxNetwork(NetworkContract):
    network_class = OnnxNetwork

    def content(self):
        return ...  # a file of the engine: `sum` and `product` of `a` and `b`
"""

import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import numpy as np
import pytest

from hps.errors import ModelFileError
from hps.networks.base import Network, NetworkTensor

WIDTH = 4
A, B, C = (NetworkTensor(name, "float32", (-1, WIDTH)) for name in "abc")
FILE = "models/dense.file"


def values(samples: int, seed: int = 1) -> dict[str, np.ndarray]:
    """Make inputs of `samples` samples."""
    random = np.random.default_rng(seed)
    return {name: random.standard_normal((samples, WIDTH), np.float32) for name in "ab"}


def assert_right(got: Mapping[str, np.ndarray], inputs: Mapping[str, np.ndarray], outputs: Sequence[str]) -> None:
    """Require exactly these outputs, with the right values for the inputs."""
    expected = {"sum": inputs["a"] + inputs["b"], "product": inputs["a"] * inputs["b"]}
    assert set(got) == set(outputs)
    for name in outputs:
        assert isinstance(got[name], np.ndarray)
        np.testing.assert_allclose(got[name], expected[name], rtol=1e-6, strict=True)


class NetworkContract:
    """Subclass it; give `network_class` and `content`. It opens networks on the CPU."""

    network_class: ClassVar[type[Network]]
    trial_samples: ClassVar[Sequence[int]] = (1, 2, 17)
    """Numbers of samples with which a network runs, one after the other."""

    def content(self) -> bytes:
        """The file of a network that takes `a` and `b`, (samples, 4) of float32, and names two outputs: `sum` and `product`."""
        raise NotImplementedError("a subclass makes a file of its engine")

    def opened(
        self, *inputs: NetworkTensor, outputs: Sequence[str] = ("sum", "product"), content: bytes | None = None
    ) -> Network:
        return self.network_class.open(FILE, self.content() if content is None else content, inputs or (A, B), outputs, None)

    def answer(self, network: Network, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return network.fetch(network.run({name: network.put(array) for name, array in inputs.items()}))

    # -- runs -----------------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("inputs", [(A, B), (B, A)], ids=["in order", "in another order"])
    @pytest.mark.parametrize("outputs", [("sum", "product"), ("product", "sum"), ("product",)])
    def test_inputs_and_outputs_are_told_by_their_names(
        self, inputs: tuple[NetworkTensor, ...], outputs: tuple[str, ...]
    ) -> None:
        network, given = self.opened(*inputs, outputs=outputs), values(3)
        assert_right(self.answer(network, given), given, outputs)
        network.close()

    def test_each_run_has_its_own_number_of_samples(self) -> None:
        network = self.opened()
        for samples in self.trial_samples:
            given = values(samples, seed=samples)
            assert_right(self.answer(network, given), given, ("sum", "product"))
        network.close()

    def test_the_same_inputs_have_the_same_outputs_each_time(self) -> None:
        """Nothing is drawn and nothing is learned, whatever the network did when it was trained."""
        network, given = self.opened(), values(50)
        first = {name: array.tobytes() for name, array in self.answer(network, given).items()}
        for _ in range(3):
            assert {name: array.tobytes() for name, array in self.answer(network, given).items()} == first
        network.close()

    def test_threads_run_it_at_once_and_get_their_own_outputs(self) -> None:
        network = self.opened()

        def run(seed: int) -> None:
            given = values(1 + seed % 5, seed)
            assert_right(self.answer(network, given), given, ("sum", "product"))

        with ThreadPoolExecutor(4) as threads:
            for running in [threads.submit(run, seed) for seed in range(40)]:
                running.result()
        network.close()

    def test_a_network_that_is_closed_leaves_others_of_its_file_alone(self) -> None:
        content, given = self.content(), values(2)
        first, second = self.opened(content=content), self.opened(content=content)
        first.close()
        assert_right(self.answer(second, given), given, ("sum", "product"))
        second.close()

    # -- tensors --------------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("dtype", ["float32", "float16", "float64", "int64", "int32", "int16", "int8", "uint8", "bool"])
    def test_features_of_each_dtype_arrive(self, dtype: str) -> None:
        network = self.opened()
        array = np.array([[0, 1, 2], [3, 0, 1]]).astype(dtype)
        np.testing.assert_array_equal(network.fetch({"x": network.put(array)})["x"], array, strict=True)
        network.close()

    def test_what_is_given_once_is_repeated(self) -> None:
        network = self.opened()
        tensor = network.put(np.array([[1.0, 2.0], [3.0, 4.0]], np.float32))
        for index in ([0, 0, 1, 1, 1], [1], []):
            repeated = network.take(tensor, network.put(np.array(index, np.int64)))
            expected = [[[1.0, 2.0], [3.0, 4.0]][row] for row in index]
            np.testing.assert_array_equal(network.fetch({"x": repeated})["x"], np.array(expected, np.float32).reshape(-1, 2))
        network.close()

    def test_memory_of_the_device_is_filled_from_staged_memory(self) -> None:
        """Two features that stand behind one another in staged memory, twice."""
        network = self.opened()
        if not network.on_cuda:
            pytest.skip("it runs on the CPU alone, and reads arrays")
        size = 3 * WIDTH * 4
        memory, staged = network.staging(2 * size)
        assert (memory.dtype, memory.size) == (np.dtype(np.uint8), 2 * size)
        tensors = {name: network.empty((3, WIDTH), "float32") for name in "ab"}
        for seed in (1, 2):
            given = values(3, seed)
            for index, (name, array) in enumerate(given.items()):
                memory[index * size : (index + 1) * size] = array.view(np.uint8).reshape(-1)
                network.write(tensors[name], network.part(staged, index * size, "float32", (3, WIDTH)))
            assert_right(network.fetch(network.run(tensors)), given, ("sum", "product"))
        network.close()

    def test_outputs_are_delivered_to_staged_memory(self) -> None:
        network = self.opened()
        if not network.on_cuda:
            pytest.skip("it runs on the CPU alone, and returns arrays")
        size = 3 * WIDTH * 4
        memory, staged = network.staging(2 * size)
        delivered = {name: network.part(staged, at * size, "float32", (3, WIDTH)) for at, name in enumerate(("sum", "product"))}
        inputs = {name: network.empty((3, WIDTH), "float32") for name in "ab"}

        for seed in (1, 2):
            given = values(3, seed)
            for name, array in given.items():
                network.write(inputs[name], network.put(array))
            for name, found in network.run(inputs).items():
                network.write(delivered[name], found)
            assert_right(network.fetch(delivered), given, ("sum", "product"))
            np.testing.assert_array_equal(memory.view(np.float32)[: 3 * WIDTH], (given["a"] + given["b"]).reshape(-1))
        network.close()

    # -- what is refused --------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize(
        ("inputs", "message"),
        [
            ((A,), "got no input 'b', which it has; expected in dense.inputs: a, b"),
            ((A, C), "got no input 'b', which it has; expected in dense.inputs: a, b"),
            ((A, B, C), "got input 'c', which it lacks; expected in dense.inputs: a, b"),
        ],
    )
    def test_other_inputs_are_named(self, inputs: tuple[NetworkTensor, ...], message: str) -> None:
        with pytest.raises(ModelFileError, match=re.escape(f"opening the network {FILE}: {message}")):
            self.opened(*inputs)

    def test_another_output_is_named_when_it_is_opened_or_first_run(self) -> None:
        with pytest.raises(ModelFileError, match=rf"{FILE}: .*'score' \(dense\.outputs\)"):
            self.answer(self.opened(outputs=("sum", "score")), values(1))

    @pytest.mark.parametrize("damage", ["empty", "garbage", "an archive", "cut short"])
    def test_what_is_no_network_is_refused_by_the_name_of_its_file(self, damage: str) -> None:
        content = self.content()
        damaged = {"empty": b"", "garbage": b"x" * 1000, "an archive": b"PK\x03\x04", "cut short": content[: len(content) // 2]}
        with pytest.raises(ModelFileError, match=f"opening the network {FILE}: "):
            self.opened(content=damaged[damage])

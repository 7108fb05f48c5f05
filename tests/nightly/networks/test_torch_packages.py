"""Packages of AOTInductor, which a compiler makes."""

import io

import numpy as np
import pytest

from hps.networks.base import NetworkTensor

torch = pytest.importorskip("torch")

from tests.ring1.networks.test_torch_networks import EXAMPLES, ROWS, VALUES, WANTED, Plain, answer, opened  # noqa: E402


@pytest.mark.compiler
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_a_package_of_aot_inductor_takes_inputs_in_their_order() -> None:
    from torch._inductor import aoti_compile_and_package

    program = torch.export.export(Plain(), EXAMPLES, dynamic_shapes=(ROWS, ROWS))
    file = io.BytesIO()
    aoti_compile_and_package(program, package_path=file)
    network = opened(file.getvalue())
    np.testing.assert_allclose(answer(network)["score"], WANTED)
    strided = {name: np.asfortranarray(array) for name, array in VALUES.items()}
    np.testing.assert_allclose(answer(network, strided)["score"], WANTED)
    network.close()


class Joined(torch.nn.Module):
    def forward(self, hist: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        return torch.cat([hist % 7, item.long()[:, None]], 1)


@pytest.mark.compiler
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_a_keys_program_may_be_a_package() -> None:
    from torch._inductor import aoti_compile_and_package

    given = torch.ones(2, 3, dtype=torch.int64), torch.ones(2, dtype=torch.uint8)
    file = io.BytesIO()
    program = torch.export.export(Joined(), given, dynamic_shapes=(ROWS, ROWS))
    aoti_compile_and_package(program, package_path=file)
    tensors = NetworkTensor("hist", "int64", (-1, 3)), NetworkTensor("item", "uint8", (-1,))
    network = opened(file.getvalue(), *tensors, outputs=("keys",))
    for samples in (1, 5, 2):
        hist, item = np.arange(3 * samples).reshape(samples, 3), np.arange(250, 250 + samples).astype(np.uint8)
        wanted = np.column_stack([hist % 7, item.astype(np.int64)])
        np.testing.assert_array_equal(answer(network, {"hist": hist, "item": item})["keys"], wanted, strict=True)
    network.close()

"""Computes the memory that networks need: from their files and inputs, and from a run.

Weights take the size of the file, and kept inputs what the scorer allocates. On request, the memory of a run of a full batch is
measured, on the CPU, in a separate process.
"""

import gc
import multiprocessing
from collections.abc import Iterable, Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

from hps.configuration.load import ModelConfig
from hps.configuration.networks import DenseConfig
from hps.errors import HPSError, NetworkError
from hps.ground.memory.capacity import Need
from hps.ground.registry import implementation
from hps.networks.base import Network
from hps.scoring.deployed import OpenedNetwork, no_lookup
from hps.scoring.forms import BatchForm, kept_forms, lay_out
from hps.scoring.scorer import Scorer
from hps.scoring.signature import Signature, signature_of

_LIBRARIES: Final = {
    "pt2": ("PyTorch", 380 << 20),
    "torchscript": ("PyTorch", 380 << 20),
    "onnx": ("ONNX Runtime", 40 << 20),
}
"""By format, the library that runs it, and its RAM after a run of a small network, in builds for the CPU."""
_COPIES: Final = {"onnx": 3}  # of the file, on the CPU: ONNX Runtime keeps it, its weights, and those of products packed
_REWRITTEN: Final = {"pt2", "torchscript"}  # archives that are written anew of what was checked
_START_S: Final = 120.0  # of a process that imports an engine


def engine_needs(formats: Iterable[str]) -> list[Need]:
    """Return the needs of the libraries that run these formats; those of other packages are unknown."""
    libraries = {_LIBRARIES[network_format] for network_format in formats if network_format in _LIBRARIES}
    return [Need("ram", name, size_bytes) for name, size_bytes in sorted(libraries)]


def network_needs(config: ModelConfig, file_bytes: int, on_cuda: bool) -> Iterator[tuple[int | None, Need]]:
    """Yield what a version's network needs before it runs, by device.

    Args:
        file_bytes: size of the network's files.
        on_cuda: whether embedding caches are on GPUs.
    """
    dense, on_device = _dense(config), _on_device(config, on_cuda)
    staged, vectors = _input_bytes(signature_of(dense, config.tables), config.max_batch_size)
    if on_device:
        for device in config.deployed_device_list:
            yield device, Need("gpu", "weights", file_bytes)
            yield device, Need("gpu", "inputs of batches", staged + vectors)
            yield None, Need("pinned", f"inputs of batches, for device {device}", staged)
    else:
        yield None, Need("ram", "weights", _COPIES.get(dense.format, 1) * file_bytes)
        yield None, Need("ram", "inputs of batches", (staged + vectors) * (len(config.deployed_device_list) if on_cuda else 1))
    copies = 1 + on_device + (dense.format in _REWRITTEN)  # its content, what PyTorch reads, the weights before they are moved
    yield None, Need("ram", "the network's files", copies * file_bytes, temporary=True)


def activation_needs(config: ModelConfig, contents: Mapping[str, bytes], on_cuda: bool) -> Iterator[tuple[int | None, Need]]:
    """Run a version's network on the CPU, on zeros, and yield what its runs need, by device.

    On a GPU each form of batches with kept memory has a CUDA graph with separate memory. The memory of a sample is assumed to
    be the same as on the CPU.

    Raises:
        ModelFileError, NetworkError: it cannot be opened or run.
    """
    peak = _run_bytes(config, contents)
    if _on_device(config, on_cuda):
        forms = kept_forms(signature_of(_dense(config), config.tables), config.max_batch_size)
        graphs = max(1.0, sum(form.samples for form in forms) / config.max_batch_size)
        for device in config.deployed_device_list:
            yield device, Need("gpu", "runs of batches", int(peak * graphs))
    else:
        yield None, Need("ram", "runs of batches", peak * (len(config.deployed_device_list) if on_cuda else 1))


def _dense(config: ModelConfig) -> DenseConfig:
    if config.dense is None:
        raise ValueError(f"planning model {config.model!r}: got no network")
    return config.dense


def _on_device(config: ModelConfig, on_cuda: bool) -> bool:
    if not on_cuda:
        return False
    engine: type[Network] = implementation("network", _dense(config).format)
    return engine.on_cuda


def _input_bytes(signature: Signature, max_samples: int) -> tuple[int, int]:
    """Return the bytes of keys and features, and of vectors: those kept from the start, or else those of one full batch."""
    forms = kept_forms(signature, max_samples) or [
        BatchForm(max_samples, 0, (False,) * len(signature.features), tuple(signature.sizes[name] for name in signature.inner))
    ]
    layouts = [lay_out(signature, form, max_samples) for form in forms]
    return sum(layout.size_bytes for layout in layouts), sum(layout.buffer_bytes for layout in layouts)


def _run_bytes(config: ModelConfig, contents: Mapping[str, bytes]) -> int:
    """Measure in another process what a run of a full batch allocates."""
    context = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(config, contents, sender), daemon=True)
    process.start()
    sender.close()
    limit_s = _START_S + 2 * _dense(config).open_timeout_s
    try:
        result = receiver.recv() if receiver.poll(limit_s) else f"it has not ended within {limit_s:g} s"
    except EOFError:
        result = "its process ended unexpectedly"
    finally:
        process.kill()
        process.join(10)
    if isinstance(result, str):
        raise NetworkError(f"running the network of model {config.model!r}: {result}")
    return int(result)


def _run(config: ModelConfig, contents: Mapping[str, bytes], answer: "Connection[int | str, None]") -> None:
    try:
        opened = OpenedNetwork(config, _dense(config), contents, "", ())
        calls, max_samples = opened.networks[None], config.max_batch_size
        scorer = Scorer(config.model, config.tables, opened.signature, calls, no_lookup)
        numbers = (n for n in range(max_samples, 0, -1) if opened.signature.refused_by(n, opened.signature.sizes) is None)
        run = scorer.prepared_zeros(next(numbers, max_samples))
        gc.collect()
        before = _memory("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew: proc(5)
        calls.network.fetch(run())
        answer.send(max(0, _memory("VmHWM") - before))
    except HPSError as error:
        answer.send(str(error))
    except Exception as error:  # noqa: BLE001 - of the network
        answer.send(f"{type(error).__name__}: {str(error).partition(chr(10))[0][:300]}")


def _memory(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return 1024 * int(line.split()[1])
    return 0

"""The CUDA kernels that models with embedding caches need: for which GPUs, and whether their machine code is kept here."""

from collections.abc import Iterable, Sequence
from typing import Final

from hps.cache.base import DeviceMemoryTables, KeptKernels, KernelNeed
from hps.configuration.load import ModelConfig
from hps.versions.cache_sizes import is_static

IMAGE_GPUS: Final = {
    "80": "A100, A30",
    "86": "A10, A40, RTX 30",
    "89": "L4, L40S, RTX 40",
    "90": "H100, H200, GH200",
    "100": "B200, GB200",
    "120": "RTX PRO Blackwell, RTX 50",
}
"""NVIDIA's GPUs by compute capability (developer.nvidia.com/cuda-gpus): those that the images have kernels for."""


def kernel_needs(models: Iterable[ModelConfig]) -> list[KernelNeed]:
    """Return what the kernels of models depend on."""
    return [
        KernelNeed(
            [(table.dim, table.row_dtype) for table in model.tables],
            static=is_static(model),
            shared=not model.reason_against_sharing,
        )
        for model in models
        if model.gpucache
    ]


def kept_kernels(models: Sequence[ModelConfig], cache: type[DeviceMemoryTables]) -> list[KeptKernels]:
    """Count the kernels that a start would find on this machine, for each of its kinds of GPU.

    Raises:
        HPSError: a GPU of the configuration is not there.
    """
    devices = sorted({device for model in models if model.gpucache for device in model.deployed_device_list})
    found = [cache.kept_kernels(kernel_needs(models), device) for device in devices]
    return list({kept.architecture: kept for kept in found}.values())


def missing_text(kept: KeptKernels, config: str = "ps.json") -> str:
    """Return what a start on a GPU compiles, and the command that compiles it ahead; empty if nothing."""
    missing = kept.needed - kept.kept
    if not missing:
        return ""
    command = f"hps compile {config} --gpu sm_{kept.architecture}"
    return f"{missing} of {kept.needed} CUDA kernels for {kept.device} are compiled at the start; ahead: {command}"

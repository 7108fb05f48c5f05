"""Machine code of CUDA kernels: which of it a start on a GPU finds, what tells a user, and what the images have."""

import re
from typing import ClassVar

import pytest

from hps.cache.base import DeviceMemoryTables, KeptKernels
from hps.cache.cpu.cache import NumpyCache
from hps.configuration.load import load_configuration
from hps.ground.registry import IMPLEMENTATIONS, BuiltIn
from hps.models.sources import ModelSources
from hps.tools.planning.memory import kernels_here
from hps.versions.device_kernels import IMAGE_GPUS, kept_kernels, missing_text
from hps.versions.preflight import preflight
from tests import ROOT
from tests.servers.running_service import document_of, model_of


class OnGpus(NumpyCache, DeviceMemoryTables):
    """A cache on GPUs of two kinds; it notes what it is asked for."""

    device = "cuda"
    reason: ClassVar[str | None] = None
    asked: ClassVar[list[object]] = []

    @classmethod
    def unavailable_reason(cls) -> str | None:
        return cls.reason

    @classmethod
    def check_room(cls, *_arguments, **_sharing) -> None:
        """It has room for everything."""

    @classmethod
    def kept_kernels(cls, models, device_id):
        cls.asked.append((models, device_id))
        return KeptKernels(f"GPU {device_id}", "80" if device_id < 2 else "90", 10, 10 if device_id < 2 else 7)


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(OnGpus, "asked", [])
    cached = model_of("a", ["x", "y"], {"x": 8, "y": 4}, deployed_device_list=[0, 1, 2], device_sharing="hot")
    static = model_of("b", ["x"], {"x": 8}, embedding_cache_type="static")
    direct = model_of("c", ["x"], {"x": 2}, gpucache=False, deployed_device_list=[5])
    monkeypatch.setitem(IMPLEMENTATIONS["cache"], "cuda", BuiltIn(f"{__name__}:OnGpus"))
    return load_configuration(document_of(cached, static, direct, device="cuda")).models


def test_kernels_are_counted_once_for_each_kind_of_gpu_that_caches(models) -> None:
    found = kept_kernels(models, OnGpus)
    assert [(kept.architecture, kept.kept) for kept in found] == [("80", 10), ("90", 7)]
    needs = [([(8, "float32"), (4, "float32")], False, True), ([(8, "float32")], True, False)]
    assert OnGpus.asked == [(needs, device) for device in (0, 1, 2)]


def test_a_user_hears_what_a_start_would_compile_and_how_to_do_it_ahead() -> None:
    assert missing_text(KeptKernels("NVIDIA L4", "89", 10, 10)) == ""
    assert missing_text(KeptKernels("NVIDIA L4", "89", 10, 7), "my.json") == (
        "3 of 10 CUDA kernels for NVIDIA L4 are compiled at the start; ahead: hps compile my.json --gpu sm_89"
    )


def test_a_check_of_the_machine_warns_of_kernels_that_a_start_would_compile(models) -> None:
    configuration = load_configuration(document_of(*(model.model_dump() for model in models), device="cuda"))
    found = preflight(configuration, {}, ModelSources(configuration.model_source), 5)
    assert [(one.level, one.text) for one in found if one.where == "device"] == [
        ("warning", "3 of 10 CUDA kernels for GPU 2 are compiled at the start; ahead: hps compile ps.json --gpu sm_90"),
    ]


def test_a_plan_counts_kernels_only_where_there_is_a_gpu(models, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [kept.device for kept in kernels_here(models)] == ["GPU 1", "GPU 2"]
    monkeypatch.setattr(OnGpus, "reason", "no CUDA device")
    assert kernels_here(models) == []


def test_the_images_have_kernels_for_the_gpus_that_a_plan_names() -> None:
    found = re.findall(r"^ARG GPU_ARCHITECTURES=(.*)$", (ROOT / "deploy" / "Dockerfile").read_text(), re.MULTILINE)
    assert found == [",".join(f"sm_{architecture}" for architecture in IMAGE_GPUS)] * 2

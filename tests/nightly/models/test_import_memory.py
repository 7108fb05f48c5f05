"""`hps import` of tables that are larger than the memory that it takes."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hps.models.files import open_sparse_model
from tests.tables import table_files

Save = Callable[[Path, Any, Any], Path]

_MEASURE = """
import sys
from hps.models.importing.importer import import_model
from hps.ground.registry import implementation

def status(name):
    return int(next(line for line in open("/proc/self/status") if line.startswith(name)).split()[1]) << 10

class Sampling:
    own = 0
    def start(self, *_): pass
    def advance(self, *_): self.own = max(self.own, status("RssAnon"))
    def finish(self, *_): pass

implementation("format", sys.argv[3])
own, peak, sampling = status("RssAnon"), status("VmHWM"), Sampling()
import_model(sys.argv[1], sys.argv[2], progress=sampling)
print(sampling.own - own, status("VmHWM") - peak)
"""


@pytest.mark.parametrize(
    ("save", "name", "mapped"),
    [
        (table_files.save_npz, "npz", False),
        (table_files.save_npz_compressed, "npz", False),
        (table_files.save_pair, "npy", True),
        (table_files.save_pair_fortran, "npy", True),
        (table_files.save_safetensors, "safetensors", True),
        (table_files.save_torch, "torch", True),
        (table_files.save_torch_transposed, "torch", True),
        (table_files.save_parquet, "parquet", False),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_memory_stays_far_below_the_size_of_the_table(save: Save, name: str, mapped: bool, tmp_path: Path) -> None:
    rows, dim = 1_500_000, 32  # 204 MB
    vectors = np.zeros((rows, dim), np.float32)
    vectors[:, 0] = np.arange(rows)
    source = save(tmp_path, np.arange(rows), vectors)
    del vectors
    command = [sys.executable, "-c", _MEASURE, str(source), str(tmp_path / "out"), name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert open_sparse_model(tmp_path / "out", dim).rows == rows
    own, peak = map(int, done.stdout.split())
    assert own < 100 << 20
    if not mapped:  # else the kernel counts pages of the file, which it drops when memory is short
        assert peak < 100 << 20

"""Programs that torch scripts, or compiles with a C++ compiler, run in processes of their own; ring 2 has the exported ones."""

from pathlib import Path

import pytest

from tests.ring2.torch.test_torch_processes import check_saved_program

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("kind", ["scripted", pytest.param("compiled", marks=pytest.mark.compiler)])
def test_a_saved_program_runs_in_a_process_of_its_own(tmp_path: Path, kind: str) -> None:
    check_saved_program(kind, tmp_path)

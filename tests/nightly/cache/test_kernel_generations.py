"""Every specialisation of the kernels compiles for the GPUs of three generations."""

from pathlib import Path

import pytest

from hps.cache.cuda.kernels import Kernel
from tests.ring2.cache.test_kernel_compilation import SPECIALISATIONS, compile_for, named


@pytest.mark.parametrize("architecture", [100, 90, 80])
@pytest.mark.parametrize("kernel", SPECIALISATIONS, ids=named)
def test_compiles_for_the_architectures_of_three_generations(kernel: Kernel, architecture: int, tmp_path: Path) -> None:
    compile_for(architecture, kernel, tmp_path)

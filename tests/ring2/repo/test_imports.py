"""What a server imports to answer its first lookup, and what it leaves for later."""

import subprocess
import sys

from hps.ground.kernels.numba_kernels import compile_kernels
from hps.regions.loop_state import FRONTEND_KERNELS


def test_a_service_begins_without_engines_routes_and_fastapi() -> None:
    later = (
        "rocksdict",
        "redis",
        "boto3",
        "cupy",
        "fastapi",
        "torch",
        "hps.serve.engine.routes.control",
        "hps.stores.hash_map",
    )
    code = f"import sys, hps.serve.server; print(sorted(set({later}) & set(sys.modules)))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert shown.stdout == "[]\n"


def test_loading_kernels_imports_none_of_what_compiling_needs() -> None:
    compile_kernels(*FRONTEND_KERNELS)  # unless it is done
    code = (
        "import sys; from hps.ground.kernels.numba_kernels import compile_kernels\n"
        "from hps.regions.loop_state import FRONTEND_KERNELS\n"
        "compile_kernels(*FRONTEND_KERNELS); print(sorted({'numba.np.arrayobj', 'numba.cpython.unicode'} & set(sys.modules)))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert shown.stdout == "[]\n"


def test_layers_without_torch_say_how_to_install_it() -> None:
    code = "import sys; sys.modules['torch'] = None; import hps.torch"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert "hps.torch needs torch: pip install '.[torch]'" in shown.stderr

from tests import ROOT


def test_top_level_cuda_folder_is_no_package():
    # NVIDIA's namespace package `cuda`, which CuPy imports, must not be shadowed.
    assert not (ROOT / "cuda" / "__init__.py").exists()

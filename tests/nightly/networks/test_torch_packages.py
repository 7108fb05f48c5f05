"""Packages of AOTInductor, which a compiler makes."""

import io

import numpy as np
import pytest

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

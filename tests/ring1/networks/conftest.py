"""PyTorch's first export, and the first program that is opened, load half of it: that is no test's own time."""

import importlib.util
import io

if importlib.util.find_spec("torch"):
    import torch

    from hps.networks.base import NetworkTensor
    from hps.networks.torch_networks import ExportedProgram

    class _Double(torch.nn.Module):
        def forward(self, a: torch.Tensor) -> torch.Tensor:
            return a * 2

    _file = io.BytesIO()
    torch.export.save(torch.export.export(_Double(), (torch.ones(2, 4),), dynamic_shapes=({0: torch.export.Dim("n")},)), _file)
    ExportedProgram.open("dense.pt2", _file.getvalue(), (NetworkTensor("a", "float32", (-1, 4)),), ("out",), None)

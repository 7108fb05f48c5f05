"""Every form of the catalogue, by each engine that it allows; and modules that are large."""

from pathlib import Path

import pytest
import torch
from torch import nn

import hps
from hps.torch import package
from tests.ring2.torch.test_forms import PUBLISHED
from tests.servers.running_service import document_of
from tests.tables.torch_forms import FORMS
from tests.tables.torch_forms.judge import call, difference, judge

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("name", FORMS)
def test_a_form_is_answered_as_its_module_does_or_refused(name: str, tmp_path: Path) -> None:
    verdict = judge(FORMS[name], tmp_path)
    assert not verdict.faults, verdict.faults


@pytest.mark.parametrize("format", ["onnx", "aotinductor"])
@pytest.mark.parametrize("name", PUBLISHED)
def test_other_engines_answer_alike(name: str, format: str, tmp_path: Path) -> None:  # noqa: A002
    """An engine may refuse what it cannot run; it may not answer otherwise."""
    verdict = judge(FORMS[name], tmp_path, format=format)
    assert not verdict.wrong, verdict.faults


class ManyTables(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(3, 1) for _ in range(count)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([table(x[:, k]) for k, table in enumerate(self.tables)], 1).sum(1)


def test_four_thousand_tables(tmp_path: Path) -> None:
    module = ManyTables(4000)
    done = package(module, tmp_path / "m", (torch.randint(0, 3, (4, 4000)),))
    with hps.HPS(document_of(model_repository=str(tmp_path))) as server:
        given = (torch.randint(0, 3, (9, 4000)),)
        answer = server.score("m", done.request(*given))
        assert difference([answer["score"]], call(module, given)) <= 1e-5

"""The embeddings of a module are saved as versions of a model, which servers load and pick up."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hps import HPS, ConfigError, HPSError, InvalidDtypeError, InvalidInputError, ModelFileError, open_sparse_model
from hps.torch.saving import save
from tests.servers.running_service import document_of


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.item = nn.Embedding(50, 8)
        self.user = nn.ModuleDict({"id": nn.Embedding(30, 4, padding_idx=0), "item": self.item})
        self.tags = nn.EmbeddingBag(20, 3)
        self.top = nn.Linear(8, 1)


@pytest.fixture
def towers() -> Towers:
    torch.manual_seed(1)
    return Towers()


def rows_of(place: Path, dim: int) -> dict[int, list[float]]:
    keys, vectors = np.fromfile(place / "key", np.int64), np.fromfile(place / "emb_vector", np.float32)
    return dict(zip(keys.tolist(), vectors.reshape(-1, dim).tolist(), strict=True))


def test_every_embedding_is_a_table_once_by_its_path(tmp_path: Path, towers: Towers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hps.models.files.CHUNK_BYTES", 100)  # several chunks a table
    saved = save(towers, tmp_path / "shop")
    assert (saved.version, saved.tables) == ("1", {"item": ("item",), "user.id": ("user_id",), "tags": ("tags",)})
    for name, weight in {"item": towers.item.weight, "user_id": towers.user["id"].weight, "tags": towers.tags.weight}.items():
        assert rows_of(tmp_path / "shop" / "1" / name, weight.shape[1]) == dict(enumerate(weight.tolist()))
    with HPS(document_of(saved.entry)) as server:
        assert np.array_equal(server.lookup([49, 0], "shop", "item"), towers.item.weight.detach()[[49, 0]].numpy())


def test_keys_need_not_be_numbers_of_rows(tmp_path: Path, towers: Towers) -> None:
    keys = torch.arange(20) * 10**12 - 5
    save(towers, tmp_path / "shop", keys={"tags": keys})
    expected = dict(zip(keys.tolist(), towers.tags.weight.tolist(), strict=True))
    assert rows_of(tmp_path / "shop" / "1" / "tags", 3) == expected
    save(towers, tmp_path / "shop", keys={"tags": keys}, delta_of="1", changed={"tags": torch.tensor([9])})
    assert list(rows_of(tmp_path / "shop" / "2" / "tags", 3)) == [9 * 10**12 - 5]


def test_a_server_picks_up_one_version_after_the_other_and_deltas(tmp_path: Path, towers: Towers) -> None:
    save(towers, tmp_path / "shop", hotness={"tags": 7})
    document: dict[str, Any] = document_of(model_repository=str(tmp_path))
    with HPS(document) as server:
        with torch.no_grad():
            towers.item.weight[7] += 1
        assert save(towers, tmp_path / "shop", settings={"gpucacheper": 0.25}).version == "2"
        assert server.poll() == {"shop": None}
        assert np.array_equal(server.lookup([7], "shop", "item"), towers.item.weight[7:8].detach().numpy())
        config = server.model("shop").config
        assert (config.gpucacheper, config.maxnum_catfeature_query_per_table_per_sample) == (0.25, (1, 1, 7))
        with torch.no_grad():
            towers.item.weight[[3, 8]] += 1
        save(towers, tmp_path / "shop", delta_of="2", changed={"item": torch.tensor([8, 3, 8])})
        assert list(rows_of(tmp_path / "shop" / "3" / "item", 8)) == [3, 8]
        assert server.poll() == {"shop": None}
        assert server.model("shop").version == "3"
        assert np.array_equal(server.lookup(np.arange(50), "shop", "item"), towers.item.weight.detach().numpy())


def test_saving_reaches_any_place_that_models_can_be_read_from(tmp_path: Path, towers: Towers) -> None:
    saved = save(towers, f"file://{tmp_path}/shop", version="12", note="nightly")
    assert json.loads((tmp_path / "shop" / "12" / "version.json").read_text())["note"] == "nightly"
    assert open_sparse_model(f"{saved.place}/12/item", 8).rows == 50


def collision() -> nn.Module:
    return nn.ModuleDict({"a_b": nn.Embedding(2, 2), "a": nn.ModuleDict({"b": nn.Embedding(2, 2)})})


@pytest.mark.parametrize(
    ("make", "arguments", "error", "match"),
    [
        (collision, {}, InvalidInputError, "'a.b' and 'a_b', which would both be table 'a_b'"),
        (lambda: nn.Linear(2, 2), {}, InvalidInputError, "Linear: it has none"),
        (lambda: nn.Embedding(3, 2, device="meta"), {}, InvalidInputError, "meta device"),
        (lambda: nn.Embedding(3, 2, dtype=torch.complex64), {}, InvalidDtypeError, "complex64"),
        (Towers, {"keys": {"tags": torch.arange(3)}}, InvalidInputError, r"shape \(3,\), expected int64 \(20,\)"),
        (Towers, {"keys": {"tags": torch.zeros(20, dtype=torch.int64)}}, InvalidInputError, "1 distinct keys for 20 rows"),
        (Towers, {"keys": {"tag": torch.arange(3)}}, InvalidInputError, "keys of 'tag', expected of item, user_id, tags"),
        (Towers, {"delta_of": "1"}, InvalidInputError, "expected both or neither"),
        (Towers, {"changed": {}}, InvalidInputError, "expected both or neither"),
        (Towers, {"delta_of": "1", "changed": {"tags": torch.tensor([20])}}, InvalidInputError, "expected 0 to 19"),
        (Towers, {"delta_of": "1", "changed": {"tags": torch.ones(2)}}, InvalidDtypeError, "float32, expected int64"),
        (Towers, {"settings": {"gpucachepre": 1}}, ConfigError, "gpucacheper"),
    ],
)
def test_what_cannot_be_saved_is_refused_and_nothing_is_written(
    tmp_path: Path, make: Any, arguments: dict[str, Any], error: type[HPSError], match: str
) -> None:
    with pytest.raises(error, match=match):
        save(make(), tmp_path / "shop", **arguments)
    assert not list(tmp_path.rglob("*"))


def test_versions_of_a_model_have_the_same_tables(tmp_path: Path, towers: Towers) -> None:
    save(towers, tmp_path / "shop")
    with pytest.raises(ModelFileError, match="all versions of a model have the same tables"):
        save(nn.Embedding(3, 2), tmp_path / "shop")
    with pytest.raises(ModelFileError, match="exists"):
        save(towers, tmp_path / "shop", version="1")
    assert [path.name for path in (tmp_path / "shop").iterdir() if path.is_dir()] == ["1"]

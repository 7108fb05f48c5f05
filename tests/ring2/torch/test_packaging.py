"""A packaged module answers as the trained one does, also to inputs that it has not seen; what cannot be is refused."""

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hps
import hps.torch
from hps.torch import package
from hps.torch.tables import WeightTable
from tests.ring1.torch.test_quantised import score
from tests.servers.running_service import document_of

ROWS, DIM = 40, 6


def keys(*shape: int) -> torch.Tensor:
    return torch.randint(0, ROWS, shape)


def answers(module: nn.Module, *inputs: Any) -> Any:
    with torch.inference_mode():
        return copy.deepcopy(module).eval()(*inputs)


def dense_of(place: Path, version: str = "1") -> dict[str, Any]:
    found: dict[str, Any] = json.loads((place / "m" / version / "version.json").read_text())["dense"]
    return found


def inputs_of(place: Path) -> dict[str, Any]:
    """What `version.json` says of the inputs, without defaults."""
    defaults = {"table": None, "pooling": "none", "hotness": None, "max_norm": None, "padding_key": None, "dtype": "float32"}
    defaults |= {"shape": [-1], "offsets_of": None, "per_request": False, "request_index": False}
    return {
        name: {key: value for key, value in one.items() if defaults[key] != value}
        for name, one in dense_of(place)["inputs"].items()
    }


class Net(nn.Module):
    def __init__(self, width: int, **embeddings: nn.Module) -> None:
        super().__init__()
        for name, one in embeddings.items():
            self.add_module(name, one)
        self.top = nn.Linear(width, 1)

    def score(self, *columns: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.top(torch.cat(columns, 1))).squeeze(1)


def net(forward: Callable[..., Any], width: int = 1, **embeddings: nn.Module) -> Net:
    """A module whose inputs are called as the function's arguments."""
    return type("Made", (Net,), {"forward": forward})(width, **embeddings)  # type: ignore[no-any-return]


def bagged(**more: Any) -> Net:
    return net(lambda self, tags, age: self.score(self.tags(tags), age[:, None]), DIM + 1, tags=bag(**more))


def whole(width: int, **more: Any) -> Net:
    forward = lambda self, item, age: self.score(self.item(item).flatten(1), age[:, None])  # noqa: E731
    return net(forward, width, item=embedding(**more))


def age_of_ids() -> Net:
    return net(lambda self, ids, age: self.item(ids).sum(1) + age.float(), item=embedding())


def embedding(**more: Any) -> nn.Embedding:
    return nn.Embedding(ROWS, DIM, **more)


def bag(**more: Any) -> nn.EmbeddingBag:
    return nn.EmbeddingBag(ROWS, DIM, **more)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(7)


def check_served(place: Path, module: nn.Module, named: dict[str, Any], *given: Any) -> None:
    np.testing.assert_allclose(score(place, named)["score"], answers(module, *given), atol=1e-6)


def lookups_of(place: Path) -> dict[str, Any]:
    """What `version.json` says of lookups: table, and where the keys come from."""
    return {
        name: (one["table"], {key: got for key, got in one["keys"].items() if got is not None})
        for name, one in dense_of(place)["lookups"].items()
    }


def test_columns_of_an_input_are_looked_up_without_a_program(tmp_path: Path) -> None:
    forward = lambda self, dense, ids: self.score(dense, self.user(ids[:, 0]), self.item(ids[:, 1]), self.item(ids[:, 2]))  # noqa: E731
    module = net(forward, 3 + 3 * DIM, user=embedding(), item=embedding())
    module.train()
    done = package(module, tmp_path / "m" / "1", (torch.rand(4, 3), keys(4, 3)))
    assert (module.training, done.difference <= 1e-6, done.command) == (True, True, f"hps serve {tmp_path}")
    assert (done.version, done.place) == ("1", str(tmp_path / "m"))
    assert inputs_of(tmp_path) == {"dense": {"shape": [-1, 3]}, "ids": {"dtype": "int64", "shape": [-1, "ids_1"]}}
    columns = [(table, {"input": "ids", "column": place}) for place, table in enumerate(("user", "item", "item"))]
    assert [*lookups_of(tmp_path).values()] == columns
    assert (dense_of(tmp_path).get("keys", []), dense_of(tmp_path)["guards"]) == ([], ["ids_1 >= 3"])
    for samples in (1, 9):
        dense, ids = torch.rand(samples, 3), keys(samples, 3)
        check_served(tmp_path, module, {"dense": dense, "ids": ids}, dense, ids)
    with pytest.raises(hps.InvalidInputError, match="input 'ids' of shape \\[9, 2\\]: the network needs ids_1 >= 3, got 2"):
        score(tmp_path, {"dense": dense, "ids": ids[:, :2]})


def test_a_version_says_in_which_order_its_program_takes_its_inputs(tmp_path: Path) -> None:
    """Compiled programs take them by position, features first."""
    module = net(lambda self, item, age: self.item(item).sum(1) + age, item=embedding())
    done = package(module, tmp_path / "m" / "1", (keys(4), torch.rand(4)))
    assert [*done.dense.inputs] == ["item", "age"]
    assert dense_of(tmp_path)["network_inputs"] == ["age", "item"]


CLIPPED = {"pooling": "mean", "max_norm": 1.5, "padding_key": ROWS - 1}


@pytest.mark.parametrize(
    ("made", "hot", "said"),
    [
        (lambda: whole(3 * DIM + 1, padding_idx=0), 3, {"table": "item", "hotness": 3}),
        (lambda: whole(DIM + 1, max_norm=1.0), 1, {"pooling": "sum", "hotness": 1, "max_norm": 1.0}),
        (lambda: bagged(mode="sum"), 6, {"pooling": "sum"}),
        (lambda: bagged(mode="mean", padding_idx=3), 6, {"pooling": "mean", "padding_key": 3}),
        (lambda: bagged(mode="mean", max_norm=1.5, padding_idx=-1), 6, CLIPPED),
    ],
    ids=["vectors", "clipped vectors", "sum", "mean", "clipped mean"],
)
def test_a_whole_input_has_the_vectors_or_the_bags_of_its_keys(
    tmp_path: Path, made: Callable[[], Net], hot: int, said: dict[str, Any]
) -> None:
    module = made()
    name = "item" if hasattr(module, "item") else "tags"
    shape = (hot,) if hot > 1 else ()
    package(module, tmp_path / "m" / "1", {name: torch.randint(0, 5, (4, *shape)), "age": torch.rand(4)})
    assert inputs_of(tmp_path) == {name: {"table": name} | said, "age": {}}
    ids, age = keys(5, *shape), torch.rand(5)
    ids[0] = said.get("padding_key", 0)
    check_served(tmp_path, module, {name: ids, "age": age}, ids, age)


@pytest.mark.parametrize("include_last", [True, False])
def test_a_bag_with_offsets(tmp_path: Path, include_last: bool) -> None:
    forward = lambda self, tags, offsets, age: self.score(self.tags(tags, offsets), age[:, None])  # noqa: E731
    module = net(forward, DIM + 1, tags=bag(mode="sum", include_last_offset=include_last))
    end = [7] if include_last else []
    done = package(module, tmp_path / "m" / "1", (keys(7), torch.tensor([0, 2, 2, *end]), torch.rand(3)))
    ends = {"dtype": "int64", "shape": ["(samples + 1)" if include_last else -1], "offsets_of": "tags"}
    assert inputs_of(tmp_path) == {
        "tags": {"dtype": "int64", "shape": ["tags_0"]},
        "offsets": {name: one for name, one in ends.items() if one != [-1]},
        "age": {},
    }
    assert done.dense.dynamic_batching
    tags, offsets, age = keys(7), torch.tensor([0, 4, *end]), torch.rand(2)
    check_served(tmp_path, module, {"tags": tags, "offsets": offsets, "age": age}, tags, offsets, age)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_weights_stay_half_in_the_network(tmp_path: Path, dtype: torch.dtype) -> None:
    module = net(lambda self, item: self.top(self.item(item)).squeeze(1).float(), DIM, item=embedding()).to(dtype)
    item = keys(7)
    assert package(module, tmp_path / "m" / "1", (keys(4),)).difference == 0
    check_served(tmp_path, module, {"item": item}, item)


def test_examples_are_compared_with_the_rows_of_their_keys_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, asked = WeightTable.read, []

    def counted(self: WeightTable, rows: Any) -> torch.Tensor:
        found = read(self, rows)
        asked.append(len(found))
        return found

    monkeypatch.setattr(WeightTable, "read", counted)
    user, item = embedding(dtype=torch.float16), embedding(dtype=torch.bfloat16)
    forward = lambda self, user, item, tags: self.score(self.user(user).float(), self.item(item).float(), self.tags(tags))  # noqa: E731
    module = net(forward, 3 * DIM, user=user, item=item, tags=bag(mode="mean", padding_idx=2))
    package(module, tmp_path / "m" / "1", (torch.tensor([5, 5]), torch.tensor([9, 1]), torch.tensor([[2, 2, 2], [7, 2, 7]])))
    assert asked[:3] == [1, 2, 2]  # the keys of the examples
    assert max(asked[3:-3]) <= 3  # of what is made of them
    assert asked[-3:] == [ROWS, ROWS, ROWS]  # what is written
    given = keys(6), keys(6), keys(6, 4)
    check_served(tmp_path, module, dict(zip(("user", "item", "tags"), given, strict=True)), *given)


def test_a_table_that_several_inputs_share(tmp_path: Path) -> None:
    items = embedding()
    forward = lambda self, seen, item, last: self.score(self.items(seen).mean(1), self.items(item), self.again(last))  # noqa: E731
    module = net(forward, 3 * DIM, items=items, again=items)
    package(module, tmp_path / "m" / "1", (keys(4, 3), keys(4), keys(4)), per_request=("seen",))
    shared = {"table": "items"}
    history = {"dtype": "int64", "shape": [-1, "seen_1"], "per_request": True}
    assert inputs_of(tmp_path) == {"seen": history, "item": shared, "last": shared}
    assert lookups_of(tmp_path) == {"vectors_0": ("items", {"input": "seen"})}
    seen, item, last = keys(1, 3), keys(6), keys(6)
    check_served(tmp_path, module, {"seen": seen, "item": item, "last": last}, seen.expand(6, 3), item, last)


def test_requests_have_the_dtypes_of_the_examples(tmp_path: Path) -> None:
    module = age_of_ids()
    package(module, tmp_path / "m" / "1", (torch.arange(1, dtype=torch.int32), torch.rand(1)))
    package(module, tmp_path / "n" / "1", (torch.arange(4), torch.arange(4)))
    ids, age = keys(5), keys(5)
    check_served(tmp_path, module, {"ids": ids.int(), "age": age / 2}, ids, age / 2)
    with pytest.raises(hps.InvalidDtypeError, match="got input 'ids' of int64, expected int32"):
        score(tmp_path, {"ids": ids, "age": age / 2})
    with hps.HPS(document_of(model_repository=str(tmp_path))) as server:
        np.testing.assert_allclose(server.score("n", {"ids": ids, "age": age})["score"], answers(module, ids, age), atol=1e-6)
    assert json.loads((tmp_path / "n" / "1" / "version.json").read_text())["dense"]["inputs"]["age"]["dtype"] == "int64"


@pytest.mark.parametrize("form", ["dict", "tuple", "named"])
def test_several_outputs(tmp_path: Path, form: str) -> None:
    def forward(self: Any, item: torch.Tensor) -> Any:
        vectors = self.item(item)
        both = vectors.sum(1), vectors[:, :2]
        return {"click": both[0], "buy": both[1]} if form == "dict" else both

    module = net(forward, item=embedding())
    package(module, tmp_path / "m" / "1", (keys(4),), outputs=("a", "b") if form == "named" else None)
    names = {"dict": ["click", "buy"], "tuple": ["output0", "output1"], "named": ["a", "b"]}[form]
    assert dense_of(tmp_path)["outputs"] == names
    item = keys(5)
    found, wanted = score(tmp_path, {"item": item}), answers(module, item)
    for name, one in zip(names, wanted.values() if form == "dict" else wanted, strict=True):
        np.testing.assert_allclose(found[name], one, atol=1e-6)


def test_the_next_version_has_other_weights_and_is_numbered(tmp_path: Path) -> None:
    made = [bagged(mode="sum") for _ in range(2)]
    tags, age = keys(4, 3), torch.rand(4)
    for number, module in enumerate(made, start=1):
        done = package(module, tmp_path / "m", (tags, age), settings={"max_batch_size": 7}, note=f"number {number}")
        assert done.version == str(number)
    found = score(tmp_path, {"tags": tags, "age": age})
    assert found.version == "2"
    np.testing.assert_allclose(found["score"], answers(made[1], tags, age), atol=1e-6)
    with hps.HPS(document_of(model_repository=str(tmp_path))) as server:
        server.deploy("m", "1")
        found = server.score("m", {"tags": tags, "age": age})
    np.testing.assert_allclose(found["score"], answers(made[0], tags, age), atol=1e-6)
    with pytest.raises(hps.ModelFileError, match="it exists; write another version"):
        package(made[0], tmp_path / "m" / "2", (tags, age))


def test_settings_of_batches_are_written(tmp_path: Path) -> None:
    more: dict[str, Any] = {"dynamic_batching": False, "max_queue_delay_us": 50, "hotness": 9}
    done = package(bagged(mode="sum"), tmp_path / "m" / "5", (keys(4, 3), torch.rand(4)), **more)
    said = dense_of(tmp_path, "5")
    assert (said["dynamic_batching"], said["max_queue_delay_us"]) == (False, 50)
    assert done.entry["maxnum_catfeature_query_per_table_per_sample"] == [9]


def weighted(item: Any, ids: Any, age: Any) -> Any:
    return item(ids[:, None], per_sample_weights=age[:, None]).sum(1)


FORMS: dict[str, tuple[nn.Module, Callable[..., Any]]] = {
    "computed": (embedding(), lambda item, ids, age: item((ids * 31 + 7) % ROWS).sum(1)),
    "of other samples": (embedding(), lambda item, ids, age: item(ids.roll(1, 0)).sum(1)),
    "read outside": (embedding(), lambda item, ids, age: item(ids).sum(1) + ids.float() + (ids >= ROWS - 2)),
    "weighted": (bag(mode="sum"), weighted),
    "greatest": (bag(mode="max"), lambda item, ids, age: item(torch.stack([ids, ids // 2], 1)).sum(1)),
    "of a small set": (embedding(), lambda item, ids, age: item(ids).sum(1) + torch.eye(ROWS)[ids].sum(1)),
    "from the end": (embedding(), lambda item, ids, age: item.weight[ids - 3].sum(1)),
    "read twice": (embedding(), lambda item, ids, age: item(ids) @ item.weight.T),
}


@pytest.mark.parametrize("name", FORMS)
def test_what_a_module_does_with_keys_is_served(tmp_path: Path, name: str) -> None:
    table, forward = FORMS[name]
    module = net(lambda self, ids, age: forward(self.item, ids, age), item=table)
    done = package(module, tmp_path / "m" / "1", (torch.arange(1, 5), torch.rand(4)))
    assert done.dense.dynamic_batching == (name != "of other samples")
    assert done.dense.stale_copies == (("item",) if name == "read twice" else ())
    ids, age = keys(7), torch.rand(7)
    ids[:3] = torch.tensor([0, ROWS - 1, ROWS - 2])
    check_served(tmp_path, module, {"ids": ids, "age": age}, ids, age)


REFUSED: dict[str, tuple[nn.Module, Callable[..., Any], str]] = {
    "no tensor": (embedding(), lambda item, ids, age: float(item(ids).sum()), r"torch\.export cannot export it"),
    "computed table": (
        embedding(),
        lambda item, ids, age: nn.functional.embedding(ids, item.weight * 2).sum(1),
        r"got no lookup .* \(a table that is computed stays in the network",
    ),
    "two levels": (embedding(), lambda item, ids, age: item(item(ids).argmax(1)).sum(1), "two levels of lookups"),
    "random": (embedding(), lambda item, ids, age: item(ids).sum(1) * torch.rand(1), "draws random numbers in evaluation mode"),
    "dropout": (
        embedding(),
        lambda item, ids, age: nn.functional.dropout(item(ids)).sum(1),
        "pass training=self.training to a dropout",
    ),
    "random numbers of Python": (
        embedding(),
        lambda item, ids, age: item(ids).sum(1) * random.random(),
        "forward is a different program each time it is traced",
    ),
    "traced": (
        embedding(),
        lambda item, ids, age: item(ids).sum(1) + torch.compiler.is_compiling(),
        r"output 'score' differs by up to 1 from the module's \(the examples\)",
    ),
    "one number": (
        embedding(),
        lambda item, ids, age: item(ids).sum().reshape(1),
        "output 'score' has 1 rows, expected one for each",
    ),
    "fixed samples": (
        embedding(),
        lambda item, ids, age: item(torch.tensor(ids.tolist())).sum(1),
        "fixes the number of samples to 4",
    ),
    "branch": (
        embedding(),
        lambda item, ids, age: item(ids).sum(1) if ids.max() > 2 else age,
        "a branch on values cannot be exported: use torch.where",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_module_is_refused(tmp_path: Path, name: str) -> None:
    table, forward, message = REFUSED[name]
    with pytest.raises(hps.InvalidInputError, match=message):
        package(
            net(lambda self, ids, age: forward(self.item, ids, age), item=table),
            tmp_path / "m" / "1",
            (torch.arange(1, 5), torch.rand(4)),
        )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("examples", "message"),
    [
        ((torch.arange(4),), "its forward does not take the examples: missing a required argument: 'age'"),
        ({"ids": torch.arange(4), "years": torch.rand(4)}, "its forward does not take the examples"),
        (
            (torch.arange(4), torch.rand(4, dtype=torch.complex64)),
            "got input 'age' of torch.complex64, expected float32, float16",
        ),
        ((torch.arange(4), torch.tensor(1.0)), "got a number for input 'age', expected one for each sample"),
    ],
)
def test_examples_are_refused(tmp_path: Path, examples: Any, message: str) -> None:
    with pytest.raises(hps.InvalidInputError, match=message):
        package(age_of_ids(), tmp_path / "m" / "1", examples)
    assert not list(tmp_path.iterdir())


def test_examples_without_samples_are_refused(tmp_path: Path) -> None:
    with pytest.raises(hps.InvalidInputError, match="got input 'ids' that is empty, expected a few samples"):
        package(age_of_ids(), tmp_path / "m" / "1", (torch.arange(0), torch.rand(0)))


def test_names_are_refused(tmp_path: Path) -> None:
    examples = torch.arange(4), torch.rand(4)
    with pytest.raises(hps.InvalidInputError, match="got per_request 'id', expected some of ids, age"):
        package(age_of_ids(), tmp_path / "m" / "1", examples, per_request=("id",))
    with pytest.raises(hps.InvalidInputError, match="got 2 names of outputs, expected 1"):
        package(age_of_ids(), tmp_path / "m" / "1", examples, outputs=("a", "b"))
    with pytest.raises(hps.InvalidInputError, match="it has no embedding"):
        package(nn.Linear(2, 1), tmp_path / "m" / "1", (torch.rand(2, 2),))
    assert not list(tmp_path.iterdir())

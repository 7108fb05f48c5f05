"""Layers that look up in a server over HTTP answer as those of a server in this process do, whatever happens to it."""

import io
import logging
import pickle
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hps
import hps.torch
from hps.testing.waiting import PATIENCE_S
from hps.torch import BagTable, EmbeddingBag, EmbeddingBagCollection, LookupLayer, attach, close, convert
from hps.torch.servers import server_of
from tests.servers.running_service import document_of, model_of
from tests.servers.served_process import ServedProcess

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:.*fork:DeprecationWarning")
DIMS = {"user": 8, "item": 5}
ROWS, DEFAULT = 400, 0.25


def write(directory: Path, version: int) -> None:
    rng = np.random.default_rng(version)
    for name, dim in DIMS.items():
        rows = rng.standard_normal((ROWS, dim)).astype(np.float32)
        hps.write_sparse_model(directory / "m" / str(version) / name, (np.arange(ROWS), rows))


def document(directory: Path) -> dict[str, Any]:
    """Without an embedding cache, bags are added up in the order of their keys, always."""
    more = {"default_value_for_each_table": [DEFAULT] * 2, "maxnum_catfeature_query_per_table_per_sample": [20, 20]}
    model = model_of("m", list(DIMS), DIMS, version_path=str(directory / "m"), gpucache=False, **{"checks": False, **more})
    return document_of(model, service={"admin_token": "admin"})


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("remote")
    write(directory, 1)
    return directory


@pytest.fixture(scope="module")
def local(directory: Path) -> Iterator[hps.HPS]:
    with hps.HPS(document(directory)) as server:
        yield server


@pytest.fixture(scope="module")
def service(directory: Path) -> Iterator[ServedProcess]:
    with ServedProcess(document(directory), directory) as served:
        yield served


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    close()
    torch.compiler.reset()


def bags(seed: int, count: int = 30) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, some of them absent; offsets with the end, some bags empty; and weights."""
    rng = np.random.default_rng(seed)
    ends = np.cumsum(rng.integers(0, 9, count))
    keys = rng.integers(0, ROWS + 20, ends[-1] if count else 0)
    weights = rng.normal(size=keys.size).astype(np.float32)
    return torch.from_numpy(keys), torch.from_numpy(np.append(0, ends)), torch.from_numpy(weights)


@pytest.mark.parametrize(
    "arguments",
    [{"mode": "sum"}, {"mode": "mean", "max_norm": 0.7, "include_last_offset": True, "padding_idx": -1}, {"mode": "sqrtn"}],
)
def test_bags_are_those_of_a_local_layer_bit_for_bit(service: ServedProcess, local: hps.HPS, arguments: Any) -> None:
    remote, own = (EmbeddingBag(place, "m", "user", 8, **arguments) for place in (service.url, local))
    keys, offsets, weights = bags(1)
    offsets = offsets if own.include_last_offset else offsets[:-1]
    for given in (
        (keys, offsets),
        (keys.int(), offsets.int(), weights.requires_grad_()),
        (keys[:24].view(6, 4), None, weights[:24].view(6, 4)),
        (keys[:0].view(0, 4),),
        (keys[:0], torch.zeros(3, dtype=torch.int64)),
    ):
        got = remote(*given)
        assert torch.equal(got, own(*given))
        assert not got.requires_grad


TABLES = [
    BagTable("item", ("clicked", "bought"), 5, pooling="sum"),
    BagTable("user", ("owner",), 8, pooling="mean", max_norm=1.0),
    BagTable("item", ("seen", "liked"), 5, pooling="sqrtn", padding_idx=2),
]


@pytest.mark.parametrize("is_weighted", [False, True])
def test_a_collection_with_features_that_share_tables_is_that_of_a_local_one(
    service: ServedProcess, local: hps.HPS, is_weighted: bool
) -> None:
    remote, own = (EmbeddingBagCollection(place, "m", TABLES, is_weighted=is_weighted) for place in (service.url, local))
    given = {name: bags(nth)[: 3 if is_weighted else 2] for nth, name in enumerate(remote.feature_names)}
    for _ in range(2):
        expected = own(given)
        for name, got in remote(given).items():
            assert torch.equal(got, expected[name])


class Model(nn.Module):
    def __init__(self, place: Any, **options: Any) -> None:
        super().__init__()
        self.rows = LookupLayer(place, "m", "item", 5, **options)
        self.bags = EmbeddingBag(place, "m", "user", 8, mode="mean", include_last_offset=True, **options)

    def forward(self, keys: Tensor, offsets: Tensor) -> Tensor:
        return torch.cat([self.rows(keys[: offsets.numel() - 1]), 2 * self.bags(keys, offsets)], 1)


INPUTS = torch.arange(10), torch.tensor([0, 1, 4, 10])


def scripted(model: Model) -> Callable[..., Tensor]:
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(model), file)
    file.seek(0)
    return torch.jit.load(file)


def test_a_program_has_the_address_and_the_options_alone(service: ServedProcess, local: hps.HPS) -> None:
    model = Model(service.url, timeout_s=PATIENCE_S, fallback=0.5)
    programs = [scripted(model), pickle.loads(pickle.dumps(model)), torch.export.export(model, INPUTS).module()]
    expected = Model(local)(*INPUTS)
    close()
    for program in programs * 2:
        assert torch.equal(program(*INPUTS), expected)


def test_layers_of_a_process_share_a_client_and_differ_in_their_options(service: ServedProcess) -> None:
    layers = [LookupLayer(service.url, "m", "item", 5, timeout_s=timeout_s) for timeout_s in (None, 30.0, 70.0)]
    layers += [LookupLayer([service.url], "m", "item", 5, fallback=0.0), LookupLayer(layers[1].ps_config_file, "m", "item", 5)]
    for layer in layers:
        layer(torch.arange(3))
    servers: list[Any] = [server_of(layer.ps_config_file) for layer in layers]
    assert len({id(server.client) for server in servers}) == 1
    assert [server.options.timeout_s for server in servers] == [None, 30.0, 70.0, None, 30.0]
    again = LookupLayer(layers[1].ps_config_file, "m", "item", 5, timeout_s=0.5, fallback=1.0)
    assert again.ps_config_file == f"{service.url}#timeout_s=0.5&fallback=1.0"


def test_a_client_of_the_callers_has_its_token_and_stays_open(service: ServedProcess) -> None:
    with hps.connect(service.url, token="admin") as client:
        layer = LookupLayer(client, "m", "item", 5, timeout_s=40.0)
        before = layer(torch.tensor([5]))
        client.insert([5], np.full((1, 5), 7.0), "m", "item")
        assert layer(torch.tensor([5])).tolist() == [[7.0] * 5]
        client.insert([5], before.numpy(), "m", "item")
        with hps.connect(service.url) as other:
            attach(other, "named")
            named = LookupLayer("named", "m", "item", 5, timeout_s=20.0)
            assert torch.equal(named(torch.tensor([5])), before)
            attach(client, "named")
            assert server_of(named.ps_config_file).client is client  # type: ignore[union-attr]
        close()
        assert client.lookup([5], "m", "item").shape == (1, 5)
    attach(client, "named")
    for options in ({}, {"fallback": 0.0}):
        with pytest.raises(hps.NotReadyError, match="closed"):
            LookupLayer("named", "m", "item", 5, **options)(torch.tensor([5]))
    assert torch.equal(layer(torch.tensor([5])), before), "an address opens by itself"


def test_what_is_wrong_is_refused(service: ServedProcess, local: hps.HPS) -> None:
    keys = torch.arange(3)
    for options in ({"timeout_s": 0.0}, {"timeout_s": -1.0}, {"fallback": float("nan")}, {"timeout_s": float("inf")}):
        with pytest.raises(hps.InvalidInputError, match="making a layer"):
            LookupLayer(service.url, "m", "item", 5, **options)
    with pytest.raises(hps.InvalidInputError, match="server in this process"):
        LookupLayer(local, "m", "item", 5, fallback=0.0)
    attach(local, "mine")
    with pytest.raises(hps.InvalidInputError, match="server in this process"):
        LookupLayer("mine", "m", "item", 5, timeout_s=1.0)(keys)
    for wrong in ("http://", "http://host:99999999", ["ps.json"], []):
        with pytest.raises(hps.InvalidInputError, match="got"):
            LookupLayer(wrong, "m", "item", 5)
    wrongs = ("item", 8, hps.InvalidInputError), ("x", 5, hps.UnknownTableError), (2, 5, hps.UnknownTableError)
    for table, dim, error in wrongs:
        for make in (LookupLayer, EmbeddingBag):
            for _ in range(2):
                with pytest.raises(error):
                    make(service.url, "m", table, dim, fallback=0.0)(keys.view(1, 3))
    with pytest.raises(hps.UnknownModelError):
        LookupLayer(service.url, "x", "item", 5, fallback=0.0)(keys)
    with pytest.raises(hps.InvalidInputError, match="wait=False"):
        LookupLayer(service.url, "m", "item", 5, wait=False)(keys)
    with pytest.raises(hps.TrainingModeError):
        LookupLayer(service.url, "m", "item", 5).train()(keys)
    both = EmbeddingBagCollection(service.url, "m", [BagTable("item", ("a",), 5), BagTable(1, ("b",), 5)])  # type: ignore[arg-type]
    with pytest.raises(hps.InvalidInputError, match="each by id or by name"):
        both({"a": keys.view(1, 3), "b": keys.view(1, 3)})


def test_each_death_of_the_server_is_an_error_or_the_fallback_and_ends(
    directory: Path, local: hps.HPS, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys, _ = INPUTS
    given = {name: keys.view(5, 2) for name in ("clicked", "bought", "owner", "seen", "liked")}
    expected = Model(local)(*INPUTS)
    with ServedProcess(document(directory), tmp_path) as served:
        strict, lenient = Model(served.url), Model(served.url, fallback=0.5)
        collection = EmbeddingBagCollection(served.url, "m", TABLES, fallback=-1.0)
        program = scripted(lenient)
        for death in range(2):
            for model in (strict, lenient, program):
                assert torch.equal(model(*INPUTS), expected)
            served.stop(signal.SIGKILL)
            with pytest.raises(hps.RemoteConnectionError), caplog.at_level(logging.WARNING):
                strict(*INPUTS)
            away = torch.cat([torch.full((3, 5), 0.5), torch.full((3, 8), 1.0)], 1)
            for model in (lenient, program, lenient):
                assert torch.equal(model(*INPUTS), away)
            assert (torch.cat(list(collection(given).values()), 1) == -1).all()
            if not death:
                served.start()
    assert "layers of model m answer 0.5 for every element" in caplog.text


def test_a_silent_server_costs_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        for _ in range(2):
            with pytest.raises(hps.RemoteTimeoutError):
                LookupLayer(url, "m", "item", 5, timeout_s=0.05)(torch.arange(3))
            assert (LookupLayer(url, "m", 1, 5, timeout_s=0.05, fallback=2.0)(torch.arange(3)) == 2).all()


class Changing(hps.Client):
    """Deploys another version after each of some requests."""

    def __init__(self, made: hps.Client, versions: list[str]) -> None:
        vars(self).update(vars(made))
        self.versions, self.asked = versions, 0

    def lookup_pooled(self, *args: Any, **named: Any) -> Any:
        answer = super().lookup_pooled(*args, **named)
        self.asked += 1
        if self.versions:
            self.ask("/v1/models/m/deploy", "POST", {"version": self.versions.pop(0)}, timeout_s=PATIENCE_S)
        return answer


def test_layers_follow_or_keep_their_version_and_no_answer_mixes_two(tmp_path: Path) -> None:
    for version in (1, 2, 3):
        write(tmp_path, version)
    keys = torch.arange(20)
    given = {name: keys.view(10, 2) for name in ("clicked", "bought", "owner", "seen", "liked")}
    rows, pooled = {}, {}
    with hps.HPS(document(tmp_path), deploy_models=False) as server:
        for version in ("1", "2", "3"):
            server.deploy("m", version)
            rows[version] = LookupLayer(server, "m", "item", 5)(keys)
            pooled[version] = torch.cat(list(EmbeddingBagCollection(server, "m", TABLES)(given).values()), 1)
    with ServedProcess(document(tmp_path), tmp_path) as served, hps.connect(served.url, token="admin") as client:

        def deploy(version: str) -> None:
            client.ask("/v1/models/m/deploy", "POST", {"version": version}, timeout_s=PATIENCE_S)

        deploy("1")
        latest, by_id = (LookupLayer(served.url, "m", table, 5, version="latest") for table in ("item", 1))
        default, pinned = LookupLayer(served.url, "m", 1, 5), LookupLayer(served.url, "m", "item", 5, version=1)
        module = convert(nn.ModuleDict({"item": nn.Embedding(9, 5, device="meta")}), served.url, "m")
        follows = convert(nn.ModuleDict({"item": nn.Embedding(9, 5, device="meta")}), served.url, "m", version="latest")
        for version in ("1", "2", "3"):
            deploy(version)
            for layer in (latest, default, by_id, follows["item"]):  # type: ignore[index]
                assert torch.equal(layer(keys), rows[version])
            for layer in (pinned, module["item"]):  # type: ignore[index]
                if version == "1":
                    assert torch.equal(layer(keys), rows["1"])
                    continue
                for _ in range(2):
                    with pytest.raises(hps.VersionMismatchError, match=r"of version 1: .*'latest' follows"):
                        layer(keys)
        attach(changing := Changing(client, ["1", "2", "3", "2"]), "changing")
        collection = EmbeddingBagCollection("changing", "m", TABLES)
        got = torch.cat(list(collection(given).values()), 1)
        assert any(torch.equal(got, one) for one in pooled.values())
        assert changing.asked > 4, "it was asked again"
        deploy("1")
        assert torch.equal(pinned(keys), rows["1"])
        changing.versions = ["2"]
        own = EmbeddingBagCollection("changing", "m", TABLES, version=1)
        with pytest.raises(hps.VersionMismatchError):
            own(given)


def test_a_module_is_converted_to_a_remote_server(service: ServedProcess, local: hps.HPS, tmp_path: Path) -> None:
    class Trained(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.user = nn.EmbeddingBag(ROWS, 8, mode="sum", device="meta")
            self.item = nn.Embedding(ROWS, 5, device="meta")

        def forward(self, keys: Tensor) -> Tensor:
            return torch.cat([self.user(keys), self.item(keys[:, 0])], 1)

    keys = torch.arange(12).view(4, 3)
    converted = convert(Trained(), service.url, "m", timeout_s=50.0, fallback=0.0)
    assert torch.equal(converted(keys), convert(Trained(), local, "m")(keys))
    layer: Any = converted.item
    assert (layer.version, layer.ps_config_file) == ("1", f"{service.url}#timeout_s=50.0&fallback=0.0")
    with pytest.raises(hps.InvalidInputError, match="expected one in this process"):
        convert(nn.Embedding(3, 5), service.url, "m", repository=tmp_path)
    with pytest.raises(hps.UnknownVersionError):
        convert(Trained(), service.url, "m", version=7)

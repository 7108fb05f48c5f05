"""`hps.connect` and `hps.connect_async` with a real `hps serve`."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hps
from hps.configuration.tokens import digest_of
from tests.servers.certificates import Authority
from tests.servers.running_service import document_of, model_of
from tests.servers.served_process import ServedProcess

DIMS = {"item": 4, "user": 16}
ROWS = 500
TOKEN, ADMIN = "reader-token", "admin-token"


def vectors_of(name: str, keys: Any) -> np.ndarray:
    return (np.asarray(keys, np.float32)[:, None] * len(name) + np.arange(DIMS[name]) / 64).astype(np.float32)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedProcess]:
    directory = tmp_path_factory.mktemp("client")
    for name in DIMS:
        keys = np.arange(ROWS)
        hps.write_sparse_model(directory / f"{name}.model", (keys, vectors_of(name, keys)))
    options = {"default_value_for_each_table": [0.25, 0.5], "hit_rate_threshold": 1.1}  # every answer is complete
    model = model_of("m", [directory / f"{name}.model" for name in DIMS], DIMS, **options)
    tokens = {"bearer_token": TOKEN, "admin_token": ADMIN}
    with ServedProcess(document_of(model, service=tokens), directory) as served:
        yield served


@pytest.fixture
def client(service: ServedProcess) -> Iterator[hps.Client]:
    with hps.connect(service.url, token=ADMIN) as made:
        yield made


def test_vectors_are_the_callers_own_or_lie_where_out_does(client: hps.Client) -> None:
    """That they are those of the server in process is shown in tests/ring2/serve/test_wires.py."""
    keys = np.array([3, 499, 3, -1, 10**12])
    expected = vectors_of("item", keys)
    expected[3:] = 0.25
    vectors, found = client.lookup(list(keys), "m", "item", return_found=True, version="1", device_id=0)
    assert (vectors == expected).all()
    assert (vectors.flags.aligned, vectors.flags.writeable) == (True, True)
    assert found.tolist() == [True, True, True, False, False]
    tables = {"user": keys[:2].astype(np.int32), "item": keys}
    both, masks = client.lookup_tables(tables, "m", return_found=True)
    assert list(both) == list(masks) == ["user", "item"]
    assert (both["user"] == vectors_of("user", keys[:2])).all()
    for dtype in (np.float32, np.float16):
        out = np.full((6, 4), 7, dtype)
        assert client.lookup(keys, "m", "item", out=out) is out
        assert (out[:5] == expected.astype(dtype)).all()
        assert (out[5] == 7).all()
        assert client.lookup([], "m", "item", out=np.empty((0, 4), dtype)).shape == (0, 4)
    with pytest.raises(hps.InvalidDtypeError, match="got float64, expected float32, float16 or bfloat16"):
        client.lookup(keys, "m", "item", out=np.empty((5, 4)))
    pooled = client.lookup_pooled({"item": hps.Bags([1, 2, 3], [0, 2, 2, 3])}, "m")["item"]
    assert pooled.tolist() == [vectors_of("item", [1, 2]).sum(0).tolist(), [0] * 4, vectors_of("item", [3])[0].tolist()]


def test_it_writes_reads_and_deletes_rows(client: hps.Client) -> None:
    for value in (1.0, 2.0):
        assert client.insert([10**6, 10**6 + 1], np.full((2, 4), value), "m", "item") == "1"
        assert (client.lookup([10**6], "m", "item") == value).all()
        row = client.row(10**6, "m", "item")
        assert row["found"]
        assert (row["vector"] == value).all()
        client.delete([10**6], "m", "item")
        assert not client.lookup([10**6, 10**6 + 1], "m", "item", return_found=True)[1][0]
    assert not client.row(10**6, "m", "item")["found"]


def test_it_describes_the_server(client: hps.Client) -> None:
    assert client.ready()
    assert client.models() == ("m",)
    assert client.tables("m") == client.tables("m", version="1") == DIMS
    report = client.report({"item": [1, 10**9]}, "m")
    assert report["item.keys"] == 2
    assert report["item.defaults"] == 1


ERRORS: list[tuple[type[Exception], Any]] = [  # beside those of tests/ring2/serve/test_wires.py
    (hps.UnknownVersionError, lambda client: client.lookup([1], "m", "item", version="7")),
    (hps.UnknownDeviceError, lambda client: client.lookup([1], "m", "item", device_id=9)),
    (hps.InvalidInputError, lambda client: client.insert([1], [[1.0]], "m", "item")),
    (hps.UnknownTableError, lambda client: client.row(1, "m", "x")),
]


def test_it_raises_the_errors_of_the_server_in_process(client: hps.Client) -> None:
    for error, call in ERRORS * 2:
        with pytest.raises(error) as caught:
            call(client)
        assert type(caught.value) is error
        assert client.lookup([1], "m", "item").shape == (1, 4)


def test_tokens_are_checked(service: ServedProcess) -> None:
    with hps.connect(service.url, token=TOKEN) as reader, hps.connect(service.url, token="wr0ng") as stranger:
        assert reader.lookup([1], "m", "item").shape == (1, 4)
        with pytest.raises(hps.UnauthorizedError, match="403"):
            reader.insert([1], np.zeros((1, 4)), "m", "item")
        with pytest.raises(hps.UnauthorizedError, match="401") as caught:
            stranger.lookup([1], "m", "item")
        assert "wr0ng" not in str(caught.value)
    assert TOKEN not in service.log()
    assert ADMIN not in service.log()


def test_a_server_that_is_restarted_is_asked_again(service: ServedProcess, client: hps.Client) -> None:
    """That connections of a pool are opened again and again, `ScriptedServer` shows."""
    assert (client.lookup([1, 2], "m", "item") == vectors_of("item", [1, 2])).all()
    service.stop()
    for _ in range(2):
        with pytest.raises(hps.RemoteConnectionError):
            client.lookup([1, 2], "m", "item")
    service.start()
    for _ in range(2):
        assert (client.lookup([1, 2], "m", "item") == vectors_of("item", [1, 2])).all()


def test_it_speaks_tls_and_waits_out_a_limit_of_requests(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair, own = authority.sign("localhost"), authority.sign("someone")
    token = {"name": "slow", "rights": ["lookup"], "sha256": digest_of(TOKEN), "requests_per_s": 4}
    (tmp_path / "tokens.json").write_text(json.dumps({"tokens": [token]}))
    hps.write_sparse_model(tmp_path / "item.model", (np.arange(ROWS), vectors_of("item", np.arange(ROWS))))
    paths = {"tls_certificate_path": pair.certificate, "tls_key_path": pair.key, "tls_client_ca_path": authority.path}
    settings = {name: str(path) for name, path in (paths | {"tokens_path": tmp_path / "tokens.json"}).items()}
    document = document_of(model_of("m", [tmp_path / "item.model"], {"item": DIMS["item"]}), service=settings)
    with ServedProcess(document, tmp_path) as served:
        options = {"token": TOKEN, "ca_file": authority.path, "certificate": own.both}
        with hps.connect(served.url, **options) as client:
            for first in range(9):
                assert (client.lookup([first, 2], "m", "item") == vectors_of("item", [first, 2])).all()
            with pytest.raises(hps.UnauthorizedError):
                client.insert([1], np.zeros((1, 4)), "m", "item")

        async def main() -> None:
            async with hps.connect_async(served.url, **options) as remote:
                answers = await asyncio.gather(*(remote.lookup([first], "m", "item") for first in range(9)))
                assert all((got == vectors_of("item", [first])).all() for first, got in enumerate(answers))

        asyncio.run(main())
        with pytest.raises(hps.RemoteConnectionError), hps.connect(served.url, token=TOKEN, ca_file=authority.path) as nobody:
            nobody.lookup([1], "m", "item")


def test_it_needs_no_tier() -> None:
    heavy = ["numba", "rocksdict", "redis", "boto3", "cupy", "fastapi", "uvicorn", "torch", "pydantic", "httpx"]
    code = f"import sys, hps; hps.connect; hps.connect_async; print(sorted(set({heavy}) & set(sys.modules)))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert shown.stdout == "[]\n"
    assert Path(hps.__file__).exists()

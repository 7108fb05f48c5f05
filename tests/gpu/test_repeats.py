"""Lookups that repeat an earlier launch give the vectors of the keys, tensors, stream and version of their own call."""

import gc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hps
from hps.tools.cli.tables.sample import sample_chunks, sample_vectors
from tests.gpu.cupy_if_installed import cupy
from tests.servers.running_service import document_of, model_of

if cupy:
    from hps.cache.cuda import lookup

pytestmark = pytest.mark.gpu
DIM, ROWS, N, DEFAULT = 16, 2000, 300, -1.0
Start = Callable[..., hps.HPS]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Open servers of a model `m` with two tables, whose versions 1 and 2 have other vectors."""
    opened: list[hps.HPS] = []

    def start_one(kind: str = "static", workspaces: int = 1, **settings: Any) -> hps.HPS:
        for version in (1, 2):
            for table in ("a", "b"):
                hps.write_sparse_model(tmp_path / str(version) / table, sample_chunks(ROWS, DIM, version))
        files = {version: [str(tmp_path / str(version) / table) for table in ("a", "b")] for version in (1, 2)}
        changes: dict[str, Any] = {
            "versions": [{"version": 2, "sparse_files": files[2]}],
            "default_value_for_each_table": [DEFAULT] * 2,
            "max_batch_size": 40_000,
            "hit_rate_threshold": 1.1,
            "embedding_cache_type": kind,
            "gpucacheper": 1.0,
            "num_of_worker_buffer_in_pool": workspaces,
            **settings,
        }
        opened.append(hps.HPS(document_of(model_of("m", files[1], {"a": DIM, "b": DIM}, **changes), device="cuda")))
        opened[-1].deploy("m", "1")  # not the last one
        return opened[-1]

    yield start_one
    for server in opened:
        server.close()


@pytest.fixture
def repeats(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The flags of each repeat."""
    flags: list[int] = []
    real = lookup.launch_and_wait

    def counted(*arguments: Any) -> int:
        flags.append(real(*arguments))
        return flags[-1]

    monkeypatch.setattr(lookup, "launch_and_wait", counted)
    return flags


def keys_of(seed: int, n: int = N, most: int = ROWS) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, most, n)


def vectors_of(keys: np.ndarray, version: int = 1) -> np.ndarray:
    return np.where((keys < ROWS)[:, None], sample_vectors(keys, DIM, version), np.float32(DEFAULT))


def on_device(keys: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(keys).cuda()


def check(out: Any, keys: np.ndarray, version: int = 1) -> None:
    vectors = out.cpu().numpy() if isinstance(out, torch.Tensor) else out.get()
    np.testing.assert_array_equal(vectors.reshape(-1, DIM)[: keys.size], vectors_of(keys, version))


def test_the_same_tensors_are_read_and_written_again(start: Start, repeats: list[int]) -> None:
    server, out = start(), torch.empty(N, DIM, device="cuda")
    tensor = torch.empty(N, dtype=torch.int64, device="cuda")
    with server.prepare({"a": tensor}, "m", out={"a": out}) as prepared:
        for seed in range(5):
            keys = keys_of(seed)
            for look_up in (lambda: server.lookup_fromdlpack(tensor, out, "m", "a"), prepared.run):
                tensor.copy_(on_device(keys))
                out.fill_(torch.nan)
                look_up()
                check(out, keys)
    assert repeats == [0] * 8  # each of both ways was new once


@pytest.mark.parametrize("of_cupy", [False, True])
def test_tensors_of_each_framework_are_read_and_written_anew(start: Start, repeats: list[int], of_cupy: bool) -> None:
    server = start()
    for seed in range(6):
        counts = (N, 2 * N) if seed % 2 else (N + 1, N)  # each twice: then a repeat
        keys = {name: keys_of(10 * seed + nth, n) for nth, (name, n) in enumerate(zip("ab", counts, strict=True))}
        given: dict[str, Any] = {name: cupy.asarray(part) if of_cupy else on_device(part) for name, part in keys.items()}
        outs: dict[str, Any] = {
            name: cupy.full((part.size, DIM), cupy.nan, cupy.float32)
            if of_cupy
            else torch.full((part.size, DIM), torch.nan, device="cuda")
            for name, part in keys.items()
        }
        server.lookup_tables(given, "m", out=outs)
        both = np.concatenate(list(keys.values()))
        joined: Any = cupy.asarray(both) if of_cupy else on_device(both)
        out: Any = cupy.zeros(both.size * DIM, cupy.float32) if of_cupy else torch.zeros(both.size * DIM, device="cuda")
        server.lookup_concatenated(joined, counts, out, "m")
        check(out, both)
        for name, part in keys.items():
            check(outs[name], part)
            outs[name].fill(cupy.nan) if of_cupy else outs[name].fill_(torch.nan)
            server.lookup_fromdlpack(given[name], outs[name], "m", name)
            check(outs[name], part)
    assert len(repeats) >= (12 if of_cupy else 18)


def test_other_tensors_at_the_same_addresses_are_looked_up_as_they_are(start: Start, repeats: list[int]) -> None:
    server = start()
    tensor, out = torch.empty(2 * N, dtype=torch.int64, device="cuda"), torch.empty(4 * N, DIM, device="cuda")
    tensor.copy_(on_device(keys := keys_of(1, 2 * N)))
    short = tensor.view(torch.int32)[:N]
    halves = out.view(torch.float16)
    for _ in range(2):
        for n in (N, 2 * N, 1, 33):
            out.fill_(torch.nan)
            server.lookup_fromdlpack(tensor[:n], out, "m", "a")
            check(out, keys[:n])
            assert torch.isnan(out[n:]).all()
        server.lookup_fromdlpack(tensor[:N], halves, "m", "a")
        narrow = halves.cpu().numpy().reshape(-1, DIM)[:N]
        np.testing.assert_array_equal(narrow, vectors_of(keys[:N]).astype(np.float16))
        server.lookup_fromdlpack(short, out, "m", "a")
        check(out, short.cpu().numpy())
        shifted = out.view(-1)[1 : 1 + N * DIM]
        server.lookup_fromdlpack(tensor[:N], shifted, "m", "a")
        check(shifted, keys[:N])
        for wrong in (tensor[::2], tensor.double()):
            with pytest.raises(hps.InvalidInputError):
                server.lookup_fromdlpack(wrong, out, "m", "a")
        with pytest.raises(hps.InvalidInputError):
            server.lookup_fromdlpack(tensor[:N], out[: N - 1], "m", "a")
        with pytest.raises(hps.TooManyKeysError):
            server.lookup_fromdlpack(torch.zeros(40_001, dtype=torch.int64, device="cuda"), out, "m", "a")
    assert len(repeats) >= 4


def test_lookups_larger_than_any_before_grow_the_lists(start: Start, repeats: list[int]) -> None:
    server = start()
    for n in (N, N, 20_000, 20_000, N, 40_000, N):
        keys = keys_of(n, n)
        out = torch.empty(n, DIM, device="cuda")
        server.lookup_fromdlpack(on_device(keys), out, "m", "a")
        check(out, keys)
    assert repeats


def test_no_tensor_of_an_earlier_lookup_is_kept(start: Start, repeats: list[int]) -> None:
    server = start()
    freed = []
    for seed in range(6):
        keys = keys_of(seed)
        before = torch.cuda.memory_allocated()
        tensor, out = on_device(keys), torch.full((N, DIM), torch.nan, device="cuda")
        server.lookup_fromdlpack(tensor, out, "m", "a")
        check(out, keys)
        del tensor, out
        gc.collect()
        freed.append(torch.cuda.memory_allocated() <= before)
    assert all(freed)
    assert repeats


def test_each_call_answers_from_the_version_that_serves(start: Start, repeats: list[int]) -> None:
    server, out = start(), torch.empty(N, DIM, device="cuda")
    keys = keys_of(3)
    tensor = on_device(keys)
    with server.prepare({"a": tensor}, "m", out={"a": out}) as prepared:
        for version in (1, 2, 1, 2):
            server.deploy("m", str(version))
            for _ in range(3):
                for look_up in (lambda: server.lookup_fromdlpack(tensor, out, "m", "a"), prepared.run):
                    out.fill_(torch.nan)
                    look_up()
                    check(out, keys, version)
        assert repeats
        server.undeploy("m")
        for look_up in (lambda: server.lookup_fromdlpack(tensor, out, "m", "a"), prepared.run):
            with pytest.raises(hps.UnknownModelError):
                look_up()


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_writes_and_absent_keys_between_repeats_are_seen(start: Start, repeats: list[int], kind: str) -> None:
    server, out, keys = start(kind), torch.empty(N, DIM, device="cuda"), np.arange(N)
    tensor, expected = on_device(keys), vectors_of(keys)

    def look_up(absent: np.ndarray) -> None:
        tensor.copy_(on_device(keys + ROWS * absent))
        out.fill_(torch.nan)
        server.lookup_fromdlpack(tensor, out, "m", "a")
        np.testing.assert_array_equal(out.cpu().numpy(), np.where(absent[:, None], np.float32(DEFAULT), expected))

    for turn in range(3):
        for _ in range(8):  # after a miss, some lookups expect others
            look_up(np.zeros(N, np.bool_))
        look_up(keys % 7 == 0)
        if kind == "dynamic":  # a static table takes none without a persistent database
            expected[turn] = 7
            server.insert(keys[turn : turn + 1], expected[turn : turn + 1], "m", "a")
    assert 0 in repeats
    assert any(repeats)  # the absent keys came as a repeat
    table = server.metrics.table("m", "a")
    assert table.keys == 3 * 9 * N
    assert table.defaults == 3 * np.count_nonzero(keys % 7 == 0)


@pytest.mark.parametrize("of_cupy", [False, True])
def test_misses_that_host_memory_has_are_answered_by_repeats(start: Start, repeats: list[int], of_cupy: bool) -> None:
    server = start("dynamic", miss_path="link", gpucacheper=0.1)
    asked = absent = 0
    tensor, answers = torch.empty(N, dtype=torch.int64, device="cuda"), torch.empty(N, DIM, device="cuda")
    with server.prepare({"a": tensor}, "m", out={"a": answers}) as prepared:
        for seed in range(8):
            keys = [keys_of(10 * seed + nth, N, ROWS + 50) for nth in range(5)]
            given: list[Any] = [cupy.asarray(part) if of_cupy else on_device(part) for part in keys]
            outs: list[Any] = [
                cupy.full((N, DIM), cupy.nan, cupy.float32) if of_cupy else torch.full((N, DIM), torch.nan, device="cuda")
                for _ in keys
            ]
            server.lookup_fromdlpack(given[0], outs[0], "m", "a")
            server.lookup_tables({"a": given[1], "b": given[2]}, "m", out={"a": outs[1], "b": outs[2]})
            both: Any = cupy.concatenate(given[3:]) if of_cupy else torch.cat(given[3:])
            joined: Any = cupy.zeros(2 * N * DIM, cupy.float32) if of_cupy else torch.zeros(2 * N * DIM, device="cuda")
            server.lookup_concatenated(both, (N, N), joined, "m")
            for out, part in zip(outs[:3], keys, strict=False):
                check(out, part)
            check(joined, np.concatenate(keys[3:]))
            tensor.copy_(on_device(keys[4]))
            answers.fill_(torch.nan)
            prepared.run()
            check(answers, keys[4])
            of_a = np.concatenate([keys[0], keys[1], keys[3], keys[4]])
            asked, absent = asked + of_a.size, absent + np.count_nonzero(of_a >= ROWS)
    assert repeats.count(1) >= (8 if of_cupy else 16)  # those that begin while a change is ordered are no repeats
    assert not [flags for flags in repeats if flags not in (0, 1)]
    table = server.metrics.table("m", "a")
    assert (table.keys, table.defaults) == (asked, absent)


def test_a_repeat_runs_on_the_stream_of_its_call(start: Start, repeats: list[int]) -> None:
    server, out = start(), torch.empty(N, DIM, device="cuda")
    tensor = torch.zeros(N, dtype=torch.int64, device="cuda")
    matrix, product = (torch.ones(2048, 2048, device="cuda") for _ in range(2))
    with server.prepare({"a": tensor}, "m", out={"a": out}) as prepared:
        for seed in range(12):
            keys = keys_of(seed)
            given = on_device(keys)
            torch.cuda.synchronize()
            made = cupy.cuda.Stream(non_blocking=True)
            with torch.cuda.stream(torch.cuda.ExternalStream(made.ptr)):
                for _ in range(10):  # a lookup on another stream would read the keys before they are written
                    torch.mm(matrix, matrix, out=product)
                tensor.copy_(given)
                if seed % 2:
                    prepared.run()
                else:
                    server.lookup_fromdlpack(tensor, out, "m", "a")
                check(out, keys)
            del made  # destroys the stream; the next one is another
    assert len(repeats) >= 10


def test_answers_on_one_stream_are_not_admitted_from_the_rows_of_another(start: Start, repeats: list[int]) -> None:
    server = start("dynamic", miss_path="link", gpucacheper=0.1)
    streams = [torch.cuda.Stream() for _ in range(2)]
    for seed in range(60):
        with torch.cuda.stream(streams[seed % 3 // 2]):
            keys, out = keys_of(seed), torch.empty(N, DIM, device="cuda")
            tensor = on_device(keys)
            server.lookup_fromdlpack(tensor, out, "m", "a")
            answered = out.clone()
            out.fill_(torch.nan)  # what is still admitted is not read from here
            check(answered, keys)
    assert repeats.count(1) >= 15


@pytest.mark.parametrize("workspaces", [1, 2])
def test_threads_with_streams_of_their_own_get_their_own_answers(start: Start, repeats: list[int], workspaces: int) -> None:
    server = start(workspaces=workspaces)

    def work(seed: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for turn in range(200):
                keys = keys_of(1000 * seed + turn, N + turn)
                out = torch.empty(keys.size, DIM, device="cuda")
                server.lookup_fromdlpack(on_device(keys), out, "m", turn % 2)
                check(out, keys)

    with ThreadPoolExecutor(2) as threads:
        for _ in threads.map(work, range(2)):
            pass
    assert len(repeats) > 100


def test_an_interrupted_repeat_leaves_nothing_to_the_next_lookup(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    server, out = start("dynamic"), torch.empty(N, DIM, device="cuda")
    keys, absent = keys_of(1, most=100), keys_of(2) + ROWS
    tensor, other = on_device(keys), on_device(absent)
    real = lookup.launch_and_wait

    def interrupt(*arguments: Any) -> int:
        real(*arguments)
        raise KeyboardInterrupt

    for _ in range(3):
        for _ in range(8):
            server.lookup_fromdlpack(tensor, out, "m", "a")
            check(out, keys)
        with monkeypatch.context() as patch:
            patch.setattr(lookup, "launch_and_wait", interrupt)
            with pytest.raises(KeyboardInterrupt):
                server.lookup_fromdlpack(other, out, "m", "a")
    server.lookup_fromdlpack(tensor, out, "m", "a")
    check(out, keys)


def test_a_repeat_that_fails_is_answered_as_a_new_lookup(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    server, out, keys = start(), torch.empty(N, DIM, device="cuda"), keys_of(1)
    tensor = on_device(keys)
    for _ in range(2):
        server.lookup_fromdlpack(tensor, out, "m", "a")
    monkeypatch.setattr(lookup, "launch_and_wait", lambda *_: -1)
    out.fill_(torch.nan)
    server.lookup_fromdlpack(tensor, out, "m", "a")
    check(out, keys)

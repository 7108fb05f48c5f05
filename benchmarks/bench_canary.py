"""What a canary and a shadow cost the clients: times of lookups with and without one, in turns.

One service with one frontend process and 32 clients, which send `rate` lookups a second altogether, whatever the answers
take. The modes take turns, in another order each round, for two seconds each after a second that does not count. Since the
machine may do other things, `p50_us` and `p99_us` are the first quartiles of those of the rounds, and `p50_ratio` and
`p99_ratio` their quotients by those of the mode `none`. Every answer is compared with the version that it names; with a shadow
that must be the serving one.
"""

import json
import select
import socket
import time
import urllib.request
from collections import Counter, deque
from functools import partial
from random import Random
from typing import Any, NamedTuple

import numpy as np

import hps
from benchmarks.harness import Report, require, scratch
from benchmarks.served import document, head, hps_serve, model

_ROWS, _DIM, _KEYS, _CLIENTS = 100_000, 32, 100, 32
_WARM_UP_S = 1.0
_PATH = "/v2/models/m/infer"
_MODES: dict[str, dict[str, float]] = {
    "none": {},
    "canary 5 %": {"canary": 0.05},
    "shadow 5 %": {"shadow": 0.05},
    "shadow 100 %": {"shadow": 1.0},
}


class _Taken(NamedTuple):
    """What the clients saw in one round."""

    seconds: np.ndarray  # (n,)
    versions: dict[str, int]


def run(report: Report, quick: bool) -> None:
    """Measure all modes; `quick` takes few rounds."""
    rate, seconds, rounds = 400, 2.0, 2 if quick else 20
    with scratch("canary") as directory:
        repository = directory / "repository"
        keys = np.arange(_ROWS, dtype=np.int64)
        for version in (1, 2):
            hps.write_version(repository / "m" / str(version), {"t0": (keys, _vectors(keys, version))})
        entry = model(["t0"], [_DIM], version_policy={"specific": {"versions": [1]}}, checks=False)
        (repository / "m" / "model.json").write_text(json.dumps(entry))
        with hps_serve({**document(), "model_repository": str(repository)}, directory, fronts=1) as server:
            report.part("modes", int(60 + 8 * rounds * seconds), partial(_modes, report, server.port, rate, seconds, rounds))


def _modes(report: Report, port: int, rate: int, seconds: float, rounds: int) -> None:
    taken: dict[str, list[_Taken]] = {mode: [] for mode in _MODES}
    compared_in: Counter[tuple[str, str]] = Counter()
    random = Random(report.seed)  # of the order: a change of versions has after-effects
    _drive(port, rate, 1.0, report.seed)
    for number in range(rounds):
        for mode in random.sample([*_MODES], len(_MODES)):
            if body := _MODES[mode]:
                # Bounds that a busy machine cannot break: what is measured is the cost.
                _ask(port, "deploy", {"version": "2", "max_p99_factor": 1000.0, **body})
            taken[mode].append(_drive(port, rate, seconds, report.seed + number))
            if body:
                for name, count in _ask(port, "", {})["compared"].items():
                    compared_in[mode, name] += count or 0
                _ask(port, "rollback", {})
    times = {
        mode: {share: float(np.quantile([np.quantile(one.seconds, share / 100) for one in found], 0.25)) for share in (50, 99)}
        for mode, found in taken.items()
    }
    for mode, found in taken.items():
        requests = sum(one.seconds.size for one in found)
        versions = {version: sum(one.versions.get(version, 0) for one in found) for version in ("1", "2")}
        require(mode.startswith("canary") or not versions["2"], "an answer of a shadow")
        axes = {"mode": mode, "clients": _CLIENTS, "rate_per_s": rate, "keys": _KEYS, "dim": _DIM, "rounds": rounds}
        compared = {f"compared_{name}": compared_in.get((mode, name), 0) for name in ("requests", "dropped", "failed")}
        measured = {f"p{share}_us": 1e6 * seconds for share, seconds in times[mode].items()}
        ratios = {f"p{share}_ratio": seconds / times["none"][share] for share, seconds in times[mode].items()}
        report.add(axes, {"requests": requests, "new_share": versions["2"] / requests, **measured, **ratios, **compared})


def _vectors(keys: np.ndarray, version: int) -> np.ndarray:
    return (keys[:, None] + 0.25 * version + np.arange(_DIM) / 64).astype(np.float32)


def _drive(port: int, rate: int, seconds: float, seed: int) -> _Taken:
    """Send lookups at a constant rate over all clients; check the answers, and return their times but for the first second."""
    rng = np.random.default_rng(seed)
    sockets = [socket.create_connection(("127.0.0.1", port)) for _ in range(_CLIENTS)]
    poll, idle = select.epoll(), deque(range(_CLIENTS))
    places = {client.fileno(): place for place, client in enumerate(sockets)}
    for client in sockets:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        poll.register(client.fileno(), select.EPOLLIN)
    sent: list[tuple[float, np.ndarray]] = [(0.0, np.empty(0, np.int64))] * _CLIENTS
    received = [bytearray() for _ in sockets]
    times, versions = [], dict.fromkeys(("1", "2"), 0)
    text = json.dumps(
        {
            "inputs": [{"name": "t0", "datatype": "INT64", "shape": [_KEYS], "parameters": {"binary_data_size": 8 * _KEYS}}],
            "parameters": {"binary_data_output": True},
        }
    ).encode()
    began, total, count, done = time.perf_counter(), int(rate * (_WARM_UP_S + seconds)), 0, 0
    opening = head(_PATH, len(text) + 8 * _KEYS, len(text)) + text
    while done < total:
        due = began + count / rate
        wait_s = max(0.0, due - time.perf_counter()) if count < total else 1.0
        if count < total and idle and wait_s == 0.0:
            place, keys = idle.popleft(), rng.integers(0, _ROWS, _KEYS)
            sent[place] = time.perf_counter(), keys
            sockets[place].sendall(opening + keys.tobytes())
            count += 1
        for descriptor, _ in poll.poll(wait_s if idle else 1.0):
            place = places[descriptor]
            received[place] += sockets[place].recv(1 << 20)
            answer = _complete(received[place])
            if answer is None:
                continue
            done += 1
            if sent[place][0] >= began + _WARM_UP_S:
                times.append(time.perf_counter() - sent[place][0])
            version, vectors = answer
            require(np.array_equal(vectors, _vectors(sent[place][1], int(version))))
            versions[version] += sent[place][0] >= began + _WARM_UP_S
            received[place] = bytearray()
            idle.append(place)
    for client in sockets:
        client.close()
    poll.close()
    return _Taken(np.array(times), versions)


def _complete(data: bytearray) -> tuple[str, np.ndarray] | None:
    """Return version and vectors of a complete answer; None for a part of one."""
    end = data.find(b"\r\n\r\n") + 4
    if end < 4:
        return None
    headers = dict(line.lower().split(b": ", 1) for line in bytes(data[:end]).split(b"\r\n")[1:] if b": " in line)
    require(data.startswith(b"HTTP/1.1 200"), bytes(data[:200]).decode(errors="replace"))
    if len(data) < end + int(headers[b"content-length"]):
        return None
    text_end = end + int(headers[b"inference-header-content-length"])
    vectors = np.frombuffer(bytes(data[text_end : text_end + 4 * _KEYS * _DIM]), np.float32).reshape(_KEYS, _DIM)
    return json.loads(data[end:text_end])["model_version"], vectors


def _ask(port: int, verb: str, body: dict[str, Any]) -> Any:
    """Change the model; with no verb, return its rollout."""
    path = f"/v1/models/m/{verb}" if verb else "/v1/models"
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", json.dumps(body).encode() if verb else None)
    request.add_header("content-type", "application/json")
    with urllib.request.urlopen(request, timeout=30) as answer:
        found = json.load(answer)
    return found if verb else found["models"][0]["rollout"]

"""Every command with hostile files, URLs and texts: one message, an exit code, never a traceback, bounded memory and time."""

import gzip
import inspect
import io
import json
import logging
import os
import resource
import signal
import traceback
import typing
import zipfile
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from hps.models.writer import write_sparse_model
from hps.tools.cli.app import app
from tests.servers.child_processes import run_alone
from tests.servers.running_service import document_of, model_of

LONGEST_S = 60  # on a busy machine
MOST_BYTES = 3 << 30
"""Address space beyond that of the imported modules."""


def npy(header: str, data: bytes = b"") -> bytes:
    text = header.encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + data


def array(kind: str, shape: str, data: bytes = b"") -> bytes:
    return npy(f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}}}", data)


def zipped(*members: tuple[str, bytes]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members:
            archive.writestr(name, data)
    return file.getvalue()


def objects() -> bytes:
    file = io.BytesIO()
    np.save(file, np.array([{}, []], object), allow_pickle=True)
    return file.getvalue()


CONTENTS: dict[str, Callable[[], bytes]] = {
    "empty": lambda: b"",
    "zeros": lambda: bytes(5000),
    "garbage": lambda: np.random.default_rng(1).bytes(5000),
    "no UTF-8": lambda: b'{"models": "\xff\xfe"}',
    "deep": lambda: b"[" * 200_000,
    "deep objects": lambda: b'{"models":' * 100_000,
    "long number": lambda: b'{"models": ' + b"9" * 10_000 + b"}",
    "other JSON": lambda: b"[1, null, NaN]",
    "scalar": lambda: b"3",
    "null models": lambda: b'{"models": [null], "volatile_db": 7}',
    "npy, huge": lambda: array("<i8", "(1000000000000000,)"),
    "npy, negative": lambda: array("<i8", "(-3, -5)", bytes(120)),
    "npy, short": lambda: array("<i8", "(1000,)", bytes(70)),
    "npy, of text": lambda: array("<U4", "(3,)", bytes(48)),
    "npy, no header": lambda: npy("{'descr': "),
    "npy, code": lambda: npy("__import__('os').abort()"),
    "npy, objects": objects,
    "npz, no array": lambda: zipped(("x.txt", b"x")),
    "npz, garbage": lambda: zipped(("x.npy", b"garbage")),
    "npz, bomb": lambda: zipped(("x.npy", array("<f4", "(10000000,)", bytes(40 << 20)))),
    "zip, cut": lambda: zipped(("x.npy", bytes(5000)))[:-10],
    "gzip bomb": lambda: gzip.compress(bytes(64 << 20)),
}
"""Contents of hostile files."""

SUFFIXES = {
    "empty": ["", ".npy", ".npz", ".pt", ".safetensors", ".parquet"],
    "garbage": ["", ".npy", ".npz", ".pt", ".safetensors", ".parquet"],
    "deep": ["", ".safetensors"],
    "npy": [".npy"],
    "npz": [".npz", ".pt", ".npy"],
    "zip": [".npz", ".pt"],
}

URLS = [
    *("", " ", "http://127.0.0.1:1/\r\nX: y", "http://a b/", "http://" + "a" * 300, "http://" + ".." * 9, "x" * 5000),
    *[
        "://",
        "http://",
        "http:///x",
        "http://[::1",
        "http://[zz]:80",
        "http://127.0.0.1:99999/",
        "http://127.0.0.1:-1",
        "http://127.0.0.1:x",
    ],
    *[
        "http://127.0.0.1:1",
        "https://127.0.0.1:1",
        "http://user:pass@:1",
        "ftp://127.0.0.1/x",
        "s3://",
        "gs://",
        "hdfs://127.0.0.1:99999/x",
    ],
    *("hdfs://[::1", "file://127.0.0.1/x", "redis://", "-", "\udcff", "http://\udcff", "http://\u2100.x", "s3://\udcff/x"),
]
TEXTS = ["", " ", "\udcff", "x" * 5000, "[" * 50, "(?P<", "9" * 5000, "-1", "nan", "inf", "1e999", "../../..", "%s{}"]

LINES = """
serve {stream}
load {stream}
init {file}
init {url}
init good --path {text}
init good --model {text} --tables {text}
init good --output {file}
import {file} out
import {file} --list
import {url} out
import good.npy {file}
import good.npy {url}
import good.npz out --tables x --write-config {file}
import {file} out --format {text}
import good.npy out --keys {file} --overwrite
import good.npy out --first-key {text}
import good.npy out --dtype {text} --row-dtype {text}
import good.npy out --config {stream} --overwrite
lookup {stream} shop item 1
lookup good.json shop item {text}
profile {stream}
profile {url}
profile good.json --keys {file} --seconds 0.01 --warmup 0
profile good.json --json {file} --seconds 0.01 --warmup 0
profile good.json --picture {file} --seconds 0.01 --warmup 0
profile http://127.0.0.1:1 --token {text}
check-config {stream} --connect
check-database {file}
compile {stream}
compile good.json --gpu {text}
plan {stream}
plan good.json --trace {file}
plan good.json --budget {text} --alpha 1
plan good.json --ram {text}
plan good.json --alpha 1 --picture {file}
row-formats {stream}
row-formats good.json --row-dtype {text}
publish {stream} shop item good
publish updates.json shop item {file}
publish updates.json shop item --delete {file}
publish updates.json shop item --since {file}
create-model {file} --rows 3 --dim 2 --overwrite
create-model {url} --rows 3 --dim 2
top {url} --once
top http://127.0.0.1:1 --once --token {text}
top http://127.0.0.1:1 --once --token-file {stream}
models {url}
models http://127.0.0.1:1 --token {text}
models http://127.0.0.1:1 --token-file {stream}
deploy shop --config {stream}
deploy {text} --version {text} --url http://127.0.0.1:1
updates replay {stream} {file}
updates replay updates.json {file}
updates status {url}
updates status http://127.0.0.1:1 --token {text}
updates status http://127.0.0.1:1 --token-file {stream}
"""
for one in ("deploy", "undeploy", "rollback", "unpin", "refresh"):
    LINES += f"{one} {{text}} --url http://127.0.0.1:1\n{one} shop --url {{url}}\n"
    LINES += f"{one} shop --url http://127.0.0.1:1 --token-file {{stream}}\n"


def commands(group: typer.Typer = app, prefix: str = "") -> Iterator[tuple[str, Callable[..., None]]]:
    for command in group.registered_commands:
        assert command.name
        assert command.callback
        yield prefix + command.name, command.callback
    for inner in group.registered_groups:
        yield from commands(inner.typer_instance, f"{inner.name} ")


def lines_of(command: str) -> list[str]:
    return [line for line in LINES.splitlines() if line.startswith(f"{command} ")]


def test_every_command_is_attacked_with_a_file_or_a_url_for_each_that_it_takes() -> None:
    for name, callback in commands():
        assert lines_of(name), name
        files = [
            key
            for key, parameter in inspect.signature(callback).parameters.items()
            if Path in (typing.get_args(parameter.annotation)[0], *typing.get_args(typing.get_args(parameter.annotation)[0]))
        ]
        for key in files:
            if name != "serve" or key != "record_trace":  # a recording is attacked where it is opened
                assert any("{file}" in line or "{stream}" in line for line in lines_of(name)), (name, key)


@pytest.mark.parametrize("command", [name for name, _ in commands()])
def test_hostile_arguments_end_in_one_message_and_a_code(command: str, tmp_path: Path) -> None:
    run_alone(attack, command, str(tmp_path))


def attack(command: str, directory: str) -> None:
    """Run a command with hostile arguments in each of its places: a share of them, others on each day."""
    os.chdir(directory)
    files = hostile_files()
    make_good_files()
    logging.raiseExceptions = False  # a handler keeps the output of an earlier command
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MOST_BYTES, resource.RLIM_INFINITY))
    signal.signal(signal.SIGALRM, give_up)
    stream = [file for file in files if "fifo" not in file]  # a configuration may come from a pipe, and is waited for
    values = {"file": files, "stream": stream, "url": URLS, "text": TEXTS}
    wrong = []
    for line in lines_of(command):
        places = [value for value in values if f"{{{value}}}" in line]
        step = 5 if "good.json" in line else 3
        for number in range(date.today().toordinal() % step, max(len(values[place]) for place in places), step):
            attacked = [values[place][number % len(values[place])] for place in places]
            chosen = dict(zip(places, attacked, strict=True))
            arguments = [word.format(**chosen) if "{" in word else word for word in line.split()]
            if said := outcome(arguments):
                wrong.append(f"{arguments}: {said}"[:3000])
    assert not wrong, "\n\n".join(wrong)
    os._exit(0)  # nothing of an attack is to be waited for


def outcome(arguments: list[str]) -> str:
    """Run a command, which an attack may hold up; return what is wrong about its end, or nothing."""
    signal.alarm(LONGEST_S)
    try:
        result = CliRunner().invoke(app, arguments)
    except LateError:
        return f"no end within {LONGEST_S} s"
    finally:
        signal.alarm(0)
    if result.exception and not isinstance(result.exception, SystemExit):
        return "".join(traceback.format_exception(result.exception)[-6:])
    if result.exit_code not in (0, 1, 2) or "Traceback" in result.output:
        return f"code {result.exit_code}: {result.output}"
    return "no message" if result.exit_code and not result.output.strip() else ""


class LateError(BaseException):
    """A command did not end."""


def give_up(*_: object) -> None:
    raise LateError


def hostile_files() -> list[str]:
    """Make hostile files and return their paths."""
    made = []
    for number, (name, content) in enumerate(CONTENTS.items()):
        kind = name.split(",")[0]
        for suffix in SUFFIXES.get(kind, [""]):
            path = Path(f"hostile{number}{suffix}")
            path.write_bytes(content())
            made.append(str(path))
    for suffix in ("", ".npy"):
        Path(f"directory{suffix}").mkdir()
        os.mkfifo(f"fifo{suffix}")
        os.symlink(f"loop{suffix}", f"loop{suffix}")
        os.symlink("/dev/zero", f"zero{suffix}")
        made += [f"{name}{suffix}" for name in ("directory", "fifo", "loop", "zero", "missing", "missing/below")]
    with open("sparse", "wb") as file:
        file.truncate(1 << 40)
    return [*made, "sparse", "/proc/self/mem", "x" * 300, "x" * 5000, "\udcff", "", "hostile0/x"]


def make_good_files() -> None:
    """Make files that are not at fault."""
    keys = np.arange(20)
    write_sparse_model("good", (keys, np.ones((20, 2), np.float32)))
    np.save("good.npy", np.ones((20, 2), np.float32))
    np.savez("good.npz", x=np.ones((20, 2), np.float32))
    model = model_of("shop", [Path("good").absolute()], {"item": 2}, gpucacheper=0.5)
    Path("good.json").write_text(json.dumps(document_of(model)))
    updates = {"update_source": {"type": "kafka", "brokers": "127.0.0.1:1"}}
    Path("updates.json").write_text(json.dumps({**document_of(model), **updates}))

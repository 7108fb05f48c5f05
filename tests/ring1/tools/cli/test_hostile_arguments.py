"""Some commands with hostile files, URLs and texts: one message, and an exit code. `nightly/tools/cli` has all of them."""

import os
from pathlib import Path

import pytest

from tests.nightly.tools.cli.test_hostile_arguments import CONTENTS, make_good_files, outcome

LINES = """
check-config deep
check-config loop
lookup no-utf-8 shop item 1
lookup good.json shop item 999999999999999999999
import npy-code.npy out
import npz-bomb.npy out
import good.npz out --tables (?P<
plan good.json --trace garbage
plan good.json --ram nan
publish null-models shop item good
create-model directory --rows 3 --dim 2 --overwrite
init missing/below
top http://[::1 --once
models http://127.0.0.1:99999/
deploy shop --url ftp://127.0.0.1/x
profile http://\udcff
"""


@pytest.mark.parametrize("line", LINES.strip().splitlines(), ids=ascii)
def test_hostile_arguments_end_in_one_message_and_a_code(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_good_files()
    Path("directory").mkdir()
    os.symlink("loop", "loop")
    for name in ("deep", "no UTF-8", "npy, code", "npz, bomb", "garbage", "null models"):
        suffix = ".npy" if "," in name else ""
        Path(name.lower().replace(",", "").replace(" ", "-") + suffix).write_bytes(CONTENTS[name]())
    assert outcome(line.split()) == ""

"""`hps serve --record-trace`."""

import json
import re
from urllib.request import Request, urlopen

import numpy as np

from hps.statistics.key_traces import read_traces
from hps.testing.waiting import wait_until
from tests.ring1.tools.cli.test_plan import config

__all__ = ["config"]


def test_a_killed_server_leaves_its_recording(config, tmp_path, children):
    path = tmp_path / "keys"
    process = children.hps("serve", config, "--port", 0, "--record-trace", path, "--trace-rate", "1", "--hash-keys")
    url = next(found[1] for line in process.stderr if (found := re.search(r"curl -s (http://\S+) -d", line)))
    body = json.dumps({"tables": {"item": list(range(7)), "user": [1]}}).encode()
    with urlopen(Request(url, body, {"Content-Type": "application/json"}), timeout=30) as answer:
        assert answer.status == 200
    wait_until(lambda: len(read_traces(path)) == 2, "the keys of both tables are written")
    process.kill()
    process.wait(30)
    traces = {trace.table: trace for trace in read_traces(path)}
    assert (traces["item"].keys.size, traces["item"].hashed, traces["user"].asked) == (7, True, 1)
    assert not np.isin(traces["item"].keys, range(7)).any()


def test_serve_refuses_a_recording_that_cannot_be_written(config, tmp_path, children):
    process = children.hps("serve", config, "--port", 0, "--record-trace", tmp_path / "no" / "keys")
    _, text = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "recording keys to" in text

"""Which server a layer finds."""

import json
import os
import threading
from pathlib import Path

import pytest
import torch

import hps
from hps.torch import LookupLayer, attach, close
from hps.torch.servers import server_of
from tests.unit.torch.conftest import Served, configuration


def test_a_path_is_opened_once_by_all_threads_and_spellings(served: Served, tmp_path: Path) -> None:
    link = tmp_path / "link.json"
    link.symlink_to(served.path)
    found: list[hps.HPS] = []
    threads = [threading.Thread(target=lambda: found.append(server_of(served.path))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(set(map(id, [*found, server_of(str(link))]))) == 1
    assert len(found) == 4


def test_closing_closes_what_paths_opened_and_nothing_else(served: Served) -> None:
    opened = server_of(served.path)
    attach(served.server, "mine")
    close()
    with pytest.raises(hps.NotReadyError):
        opened.lookup([1], "m", "user")
    served.server.lookup([1], "m", "user")
    assert server_of(served.path) is not opened
    with pytest.raises(hps.NotReadyError, match=r"neither a file nor the name.*call hps.torch.attach\(server, 'mine'\)"):
        server_of("mine")


def test_a_server_keeps_its_name_and_a_name_takes_another_server(served: Served, tmp_path: Path) -> None:
    assert attach(served.server) == attach(served.server)
    layer = LookupLayer(served.server, "m", "user", 8)
    (tmp_path / "other").mkdir()
    document, _ = configuration(tmp_path / "other")
    with hps.HPS(document) as other:
        other.insert([1], [[7.0] * 8], "m", "user")
        attach(other, layer.ps_config_file)
        assert (layer(torch.tensor([1])) == 7).all()


def test_a_new_name_is_none_that_stands_for_a_server_already(served: Served, tmp_path: Path) -> None:
    number = int(attach(served.server).rpartition("-")[2])
    close()  # as in a process that restores a program which was made in another one
    (tmp_path / "other").mkdir()
    document, _ = configuration(tmp_path / "other")
    with hps.HPS(document) as other:
        other.insert([1], [[7.0] * 8], "m", "user")
        restored = LookupLayer(attach(other, f"attached-{number + 1}"), "m", "user", 8)
        LookupLayer(served.server, "m", "user", 8)
        assert (restored(torch.tensor([1])) == 7).all()


def test_a_path_that_cannot_be_opened_is_tried_again(served: Served, tmp_path: Path) -> None:
    path = tmp_path / "late.json"
    path.write_text("{")
    layer = LookupLayer(str(path), "m", "user", 8)
    with pytest.raises(hps.ConfigError):
        layer(torch.tensor([1]))
    path.write_text(Path(served.path).read_text())
    assert layer(torch.tensor([1])).shape == (1, 8)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_opens_the_path_itself(served: Served) -> None:
    layer = LookupLayer(served.path, "m", "user", 8)
    mine = LookupLayer(attach(served.server), "m", "user", 8)
    expected = layer(torch.tensor([3])).tolist()
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        try:
            answer = json.dumps(layer(torch.tensor([3])).tolist())
            try:
                mine(torch.tensor([3]))
            except hps.ForkedProcessError:
                os.write(write, answer.encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        assert json.loads(pipe.read()) == expected
    os.waitpid(child, 0)

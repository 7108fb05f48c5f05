"""Which server a layer finds."""

import json
import os
import threading
from pathlib import Path

import pytest
import torch

import hps
from hps.testing.waiting import PATIENCE_S
from hps.torch import LookupLayer, attach, close
from hps.torch.servers import server_of
from tests.ring1.torch.conftest import Served, configuration


def test_a_path_is_opened_once_by_all_threads_and_spellings(served: Served, tmp_path: Path) -> None:
    link = tmp_path / "link.json"
    link.symlink_to(served.path)
    found: list[hps.HPS] = []
    threads = [threading.Thread(target=lambda: found.append(server_of(served.path))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
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


def test_a_new_name_stands_for_no_server_of_another_process(served: Served, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    document, _ = configuration(tmp_path / "other")
    names = []
    for _ in range(3):
        with hps.HPS(document) as server:
            names.append(LookupLayer(server, "m", "user", 8).ps_config_file)
            assert attach(server) == names[-1]
        close()  # as in a process that restores a program which was made in another one
    assert len(set(names)) == 3
    LookupLayer(served.server, "m", "user", 8)
    with pytest.raises(hps.NotReadyError, match=r"call hps.torch.attach\(server, 'attached-"):
        LookupLayer(names[0], "m", "user", 8)(torch.tensor([1]))


def test_a_path_that_cannot_be_opened_is_tried_again(served: Served, tmp_path: Path) -> None:
    path = tmp_path / "late.json"
    path.write_text("{")
    layer = LookupLayer(str(path), "m", "user", 8)
    with pytest.raises(hps.ConfigError):
        layer(torch.tensor([1]))
    path.write_text(Path(served.path).read_text())
    assert layer(torch.tensor([1])).shape == (1, 8)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("opened", [False, True])
def test_a_forked_child_opens_the_path_itself(served: Served, opened: bool) -> None:
    server = hps.HPS(served.path) if opened else None
    layer = LookupLayer(server or served.path, "m", "user", 8)
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
    if server:
        server.close()


def test_a_server_opened_from_a_path_has_that_name_until_it_is_closed(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    keys = torch.tensor([3])
    for _ in range(3):
        with hps.HPS("ps.json") as first, hps.HPS(Path("ps.json")) as second:
            layer, other = LookupLayer(first, "m", "user", 8), LookupLayer(second, "m", "user", 8)
            assert layer.ps_config_file == served.path
            assert other.ps_config_file.startswith("attached-"), "the path is the other's"
            second.insert([3], [[7.0] * 8], "m", "user")
            assert (other(keys) == 7).all()
            assert not (layer(keys) == 7).any()
            assert server_of(served.path) is first
        pinned = LookupLayer(served.path, "m", "user", 8, version=1)
        assert torch.equal(pinned(keys), served.rows(keys, "user"))
        opened = server_of(served.path)
        assert opened is not first
        assert torch.equal(layer(keys), served.rows(keys, "user"))
        with pytest.raises(hps.NotReadyError, match="it is closed"):
            other(keys)
        with hps.HPS("ps.json") as third:
            assert LookupLayer(third, "m", "user", 8).ps_config_file.startswith("attached-"), "it is open already"
        close()

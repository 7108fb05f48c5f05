"""Layers over HTTP: tables by id, and where the string of a layer ends."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch

import hps
from hps.client.addresses import read_addresses
from hps.client.remote_tables import Options, split_options
from hps.torch import LookupLayer, attach, close

ORDERS = {"1": ("a", "b"), "2": ("b", "a"), "3": ("c", "b", "a"), "4": ("a", "b")}


class Replaced(hps.Client):
    """A server whose versions have their tables in other orders. A vector says its table and version."""

    def __init__(self) -> None:
        super().__init__(read_addresses("http://127.0.0.1:1"), "", 10.0, 1)
        self.serving, self.next = "1", dict[str, str]()

    def tables(self, model_name: str, *, version: str | None = None, timeout_s: float | None = None) -> dict[str, int]:
        return dict.fromkeys(ORDERS[version or self.serving], 1)

    def lookup_tables(self, tables: Mapping[str, Any], model_name: str, **named: Any) -> Any:
        version = named["version"] or self.serving
        self.serving = self.next.pop(self.serving, self.serving)
        if unknown := set(tables) - set(ORDERS[version]):
            raise hps.UnknownTableError(f"got table {unknown}")
        return {
            name: np.full((keys.size, 1), ord(name) * 10 + int(version), np.float32) for name, keys in tables.items()
        }, version


@pytest.fixture
def client() -> Iterator[Replaced]:
    client = Replaced()
    attach(client, "replaced")
    yield client
    client.close()
    close()


def test_a_table_by_id_is_that_of_the_version_that_answers(client: Replaced) -> None:
    layers = [LookupLayer("replaced", "m", table, 1) for table in (0, 1)]
    own = LookupLayer("replaced", "m", 0, 1, version=2)
    for version in ("1", "2", "4", "3", "1", "2"):
        client.serving = version
        for table, layer in enumerate(layers):
            for _ in range(2):
                assert layer(torch.tensor([7])).item() == ord(ORDERS[version][table]) * 10 + int(version)
        assert own(torch.tensor([7])).item() == ord("b") * 10 + 2
    client.serving, client.next = "1", {"1": "2", "2": "3"}  # in the middle of calls
    for _ in range(3):
        value = int(layers[0](torch.tensor([7])).item())
        assert chr(value // 10) == ORDERS[str(value % 10)][0]
    client.serving = "1"
    with pytest.raises(hps.UnknownTableError, match="got table 2, expected 0 to 1"):
        LookupLayer("replaced", "m", 2, 1)(torch.tensor([7]))


@pytest.mark.parametrize(
    ("place", "before", "options"),
    [
        ("http://a:1,https://b", "http://a:1,https://b", Options()),
        ("http://a:1#timeout_s=0.5", "http://a:1", Options(0.5)),
        ("name#timeout_s=1e-3&fallback=-0.0", "name", Options(0.001, -0.0)),
        ("/tmp/#5/ps.json", "/tmp/#5/ps.json", Options()),
        ("/tmp/a#b=c", "/tmp/a#b=c", Options()),
        ("#fallback=1.0", "#fallback=1.0", Options()),
        ("", "", Options()),
    ],
)
def test_options_end_a_place_and_no_other_text_does(place: str, before: str, options: Options) -> None:
    assert split_options(place) == (before, options)
    assert split_options(before + options.text()) == (before, options)
    for wrong in ("#timeout_s=x", "#timeout_s=0", "#fallback=nan"):
        with pytest.raises(hps.InvalidInputError):
            split_options(f"a{wrong}")

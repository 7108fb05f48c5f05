"""Sealed versions in S3: written there, and served before they are here."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hps.configuration.tiers import ModelSourceConfig
from hps.errors import ModelFileError
from hps.models.deltas import TableSource, open_table_files
from hps.models.loading.table_load import LoadTargets, TableLoad
from hps.models.repository import list_versions, table_sources, version_files
from hps.models.sealed import SealedModel
from hps.models.sealing import seal_version
from hps.models.sources import ModelSources
from hps.models.writer import write_version
from hps.stores.row_files.database import RowFilesDatabase
from hps.testing.waiting import wait_until
from tests.servers.s3_server import S3Server, know_only_moto, s3_server
from tests.tables.table_loads import DIM, FILES, KEYS, NEW_KEY, TABLE, TAG, VECTORS, content

pytestmark = pytest.mark.s3


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> S3Server:
    know_only_moto(monkeypatch)
    return s3_server()


@pytest.fixture
def sources(server: S3Server) -> ModelSources:
    return ModelSources(ModelSourceConfig(s3_endpoint_url=server.url))


@pytest.fixture
def model(server: S3Server, sources: ModelSources) -> str:
    model = f"s3://{server.new_bucket()}/shop"
    write_version(f"{model}/1", {"item": (KEYS, VECTORS)}, sources=sources)
    changed = np.full((1, DIM), 77, np.float32)
    write_version(f"{model}/2", {"item": (NEW_KEY, changed)}, delta_of="1", deleted={"item": KEYS[1:2]}, sources=sources)
    return model


def source_of(model: str, version: str, sources: ModelSources) -> TableSource:
    places = list_versions(model, sources)
    return table_sources(version, lambda number: version_files(number, places[number], ["item"], sources))[0]


@pytest.fixture
def database(tmp_path: Path) -> Iterator[RowFilesDatabase]:
    database = RowFilesDatabase(tmp_path / "database")
    yield database
    database.close()


def load(database: RowFilesDatabase, source: TableSource, sources: ModelSources) -> None:
    TableLoad(TABLE, source, LoadTargets(load=(database,), sources=sources)).run()


def held(database: RowFilesDatabase) -> dict[int, bytes]:
    out, found = np.zeros((KEYS.size + 1, DIM), np.float32), np.zeros(KEYS.size + 1, np.bool_)
    keys = np.append(KEYS, NEW_KEY)
    database.fetch(TAG, keys, out, found)
    return content(keys[found], out[found])


@pytest.mark.parametrize("replace", [False, True])
def test_versions_are_sealed_in_place_and_served(
    model: str, server: S3Server, sources: ModelSources, database: RowFilesDatabase, replace: bool
) -> None:
    for version in ("2", "1"):
        seal_version(f"{model}/{version}", replace=replace, sources=sources)
    listed = sources.locate(model)[0].list(f"{model}/2/item")
    assert listed == (["rows"] if replace else ["deleted", "emb_vector", "key", "rows"])
    load(database, source_of(model, "1", sources), sources)
    assert held(database) == FILES
    wait_until(lambda: not database.downloads())
    load(database, source_of(model, "2", sources), sources)
    after = {key: row for key, row in FILES.items() if key != KEYS[1]} | content(NEW_KEY, np.full((1, DIM), 77, np.float32))
    assert held(database) == after
    wait_until(lambda: not database.downloads())
    record = database.load_record(TAG)
    assert record is not None
    assert record.complete
    assert held(database) == after


def test_a_file_that_is_replaced_is_never_mixed(
    model: str, server: S3Server, sources: ModelSources, database: RowFilesDatabase
) -> None:
    seal_version(f"{model}/1", replace=True, sources=sources)
    opened = open_table_files(source_of(model, "1", sources), DIM, sources=sources)
    assert isinstance(opened, SealedModel)
    write_version(f"{model}/3", {"item": (KEYS, VECTORS + 1)}, sources=sources)
    seal_version(f"{model}/3", sources=sources)
    bucket, _, place = model.removeprefix("s3://").partition("/")
    other = server.client.get_object(Bucket=bucket, Key=f"{place}/3/item/rows")["Body"].read()
    server.client.put_object(Bucket=bucket, Key=f"{place}/1/item/rows", Body=other)
    with pytest.raises(ModelFileError, match="changed"):
        opened.source.read(0, memoryview(bytearray(100)))

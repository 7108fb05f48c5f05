"""Files in Azure Blob Storage, on Microsoft's emulator: no test here has seen the real service."""

from pathlib import Path

import numpy as np
import pytest

import hps
from hps.configuration.tiers import ModelSourceConfig
from hps.errors import ModelFileError, ModelSourceError
from hps.ground.registry import implementation
from hps.models.manifest import write_file
from hps.testing.filesystems import noise
from tests.servers.azurite import ACCOUNT, Azurite
from tests.servers.azurite import azurite as azurite  # a fixture
from tests.servers.misbehaving_proxy import Answer, Drop, Silence, always, first
from tests.servers.misbehaving_proxy import MisbehavingProxy as Proxy
from tests.servers.running_service import document_of, model_of
from tests.tables.object_store_contract import ObjectStoreContract
from tests.tables.object_store_faults import OPERATIONS

pytestmark = pytest.mark.azure


@pytest.fixture
def server(azurite: Azurite) -> Azurite:
    return azurite


def store(connection: str, **settings):
    return implementation("filesystem", "az")(ModelSourceConfig(azure_connection_string=connection, **settings))


@pytest.fixture
def filesystem(server: Azurite):
    return store(server.connection_string())


@pytest.fixture
def bucket(server: Azurite) -> str:
    return server.new_bucket()


class TestAzureFileSystem(ObjectStoreContract):
    scheme = "az"
    forms = (
        "az://{}/a b/key",
        f"abfs://{{}}@{ACCOUNT}.dfs.core.windows.net/a b/key",
        f"ABFSS://{{}}@{ACCOUNT}.dfs.core.windows.net/a b/key",
        f"wasbs://{{}}@{ACCOUNT}.blob.core.windows.net/a b/key",
        f"https://{ACCOUNT}.blob.core.windows.net/{{}}/a%20b/key",
    )

    @pytest.mark.parametrize("name", ["%41", "a%20b", "a+b", "what?x=1#y", "Grüße/日本", "a b&c=d", "=;:@!$'()*,~", "x" * 900])
    def test_an_odd_name_is_written_and_found_as_it_stands(self, filesystem, top: str, name: str) -> None:
        super().test_an_odd_name_is_written_and_found_as_it_stands(filesystem, top, name)

    def test_a_name_that_clients_of_http_resolve_is_refused(self, filesystem, top: str) -> None:
        for name in ("a/../b", "./b", "a/.."):
            with pytest.raises(ModelFileError, match=r"without control characters, \. and \.\."):
                filesystem.create(f"{top}/{name}")


@pytest.mark.parametrize("size", [0, 99, 100, 101, 250])
def test_what_is_uploaded_in_blocks_arrives_whole_and_not_before(
    filesystem, server: Azurite, bucket: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hps.filesystems.azure._PART_BYTES", 100)
    writer, content = filesystem.create(f"az://{bucket}/file"), noise(size)
    writer.write(memoryview(content))
    assert server.get(f"az://{bucket}/file") is None
    writer.commit()
    assert server.get(f"az://{bucket}/file") == content


def test_two_writers_of_a_blob_mix_nothing(filesystem, server: Azurite, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hps.filesystems.azure._PART_BYTES", 100)
    contents = noise(250), noise(500)[250:]
    writers = [filesystem.create(f"az://{bucket}/file") for _ in contents]
    for start in (0, 125):
        for writer, content in zip(writers, contents, strict=True):
            writer.write(memoryview(content[start : start + 125]))
    found = []
    for writer in writers:
        try:
            writer.commit()
        except ModelFileError:  # the first commit drops the other's blocks
            continue
        found.append(server.get(f"az://{bucket}/file"))
    assert found
    assert {*found} <= {*contents}


@pytest.mark.parametrize("fault", [Answer(500), Answer(503), Drop()])
def test_a_failure_that_passes_is_not_seen_by_any_operation(server: Azurite, bucket: str, fault) -> None:
    server.put(f"az://{bucket}/model/key", noise(300_000))
    with Proxy(server.port) as proxy:
        patient = store(server.connection_string(proxy.url), timeout_s=5, deadline_s=60, max_attempts=10)
        for operation in OPERATIONS.values():
            proxy.rule = first(2, fault)
            operation(patient, f"az://{bucket}/model/key")


def test_a_host_that_does_not_answer_is_given_up(server: Azurite, bucket: str) -> None:
    with Proxy(server.port) as proxy:
        hasty = store(server.connection_string(proxy.url), timeout_s=0.3, deadline_s=1.0, max_attempts=2)
        proxy.rule = always(Silence())
        with pytest.raises(ModelSourceError, match=rf"az://{bucket}/key"):
            hasty.status(f"az://{bucket}/key")


def test_a_key_reaches_its_own_account_alone(server: Azurite) -> None:
    """Another account's host is asked without it, and no host is asked where none is named."""
    files = store(server.connection_string())
    address = files._address("abfs://models@another.dfs.core.windows.net/key")
    assert files.client(address).primary_hostname == "another.blob.core.windows.net"
    assert not hasattr(files.client(address).credential, "account_key")
    with pytest.raises(ModelFileError, match="it names no account"):
        store("").status("az://models/key")
    wrong = server.connection_string().replace("AccountKey=E", "AccountKey=F")
    with pytest.raises(ModelFileError, match=r"not allowed \(HTTP 403 AuthorizationFailure\); set model_source") as raised:
        store(wrong).status("az://models/key")
    assert "Eby8" not in str(raised.value)
    with pytest.raises(ModelFileError, match="azure_connection_string cannot be used"):
        store("no pairs of anything").status("az://models/key")


@pytest.mark.parametrize("uri", ["az://", "az://Bad_Name/key", "abfs://models@evil.org/key", "wasb://m@x/key", "az:models/key"])
def test_what_is_no_address_of_a_blob_is_refused(filesystem, uri: str) -> None:
    with pytest.raises(ModelFileError, match=r"it is no address of a blob in Azure, expected abfs://container@account"):
        filesystem.status(uri)


def test_an_address_with_a_token_is_refused_without_repeating_it(filesystem) -> None:
    with pytest.raises(ModelFileError, match="got a query, expected an address without one") as raised:
        filesystem.status(f"https://{ACCOUNT}.blob.core.windows.net/models/key?sv=2024-11-04&sig=secret")
    assert "secret" not in str(raised.value)


def test_a_model_is_served_from_a_container(server: Azurite, bucket: str, tmp_path: Path) -> None:
    keys, vectors = np.arange(100), np.random.default_rng(1).standard_normal((100, 4)).astype(np.float32)
    hps.write_sparse_model(tmp_path / "item", (keys, vectors))
    files = store(server.connection_string())
    for name in ("key", "emb_vector"):
        write_file(files, f"az://{bucket}/item/{name}", (tmp_path / "item" / name).read_bytes())
    source = {"azure_connection_string": server.connection_string()}
    document = document_of(model_of("m", [f"az://{bucket}/item"], {"item": 4}), model_source=source)
    with hps.HPS(document) as parameter_server:
        np.testing.assert_array_equal(parameter_server.lookup(keys, "m", "item"), vectors)
    assert server.connection_string() not in repr(hps.load_configuration(document))


def test_a_blob_that_is_compressed_or_stands_for_a_directory_is_not_read_as_a_file(
    filesystem, server: Azurite, bucket: str
) -> None:
    from azure.storage.blob import ContentSettings

    container = server.client.get_container_client(bucket)
    container.upload_blob("packed", b"x", content_settings=ContentSettings(content_encoding="gzip"))
    with pytest.raises(ModelFileError, match="it is stored with Content-Encoding gzip, of which no range can be read"):
        filesystem.status(f"az://{bucket}/packed")
    container.upload_blob("directory", b"", metadata={"hdi_isfolder": "true"})
    with pytest.raises(ModelFileError, match=f"az://{bucket}/directory"):
        filesystem.status(f"az://{bucket}/directory")
    server.put(f"az://{bucket}/directory", b"x")
    assert filesystem.status(f"az://{bucket}/directory").size_bytes == 1

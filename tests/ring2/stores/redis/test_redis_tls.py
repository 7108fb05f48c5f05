"""TLS, against real servers with certificates that the test makes."""

import subprocess
from contextlib import closing

import numpy as np
import pytest

from hps.configuration.tiers import VolatileDbConfig
from hps.errors import ConfigError, DatabaseError
from hps.stores.redis.database import RedisDatabase
from hps.testing.databases import TAG, distinct_keys, fetched, vectors_of
from tests.ring1.stores.redis.test_redis_connections import works
from tests.servers.certificates import certificate
from tests.servers.redis_server import RedisClusterServers, RedisServer

pytestmark = [pytest.mark.redis, pytest.mark.openssl]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("certificates")
    certificate(directory, "ca", "test authority")
    certificate(directory, "server", "redis.localhost", "ca")
    certificate(directory, "client", "hps", "ca")
    certificate(directory, "stranger", "another authority")
    return directory


@pytest.fixture(scope="module")
def servers(directory):
    """Arguments of a server that speaks it, and settings of a client of redis-py."""
    ca, certificate, key = (str(directory / name) for name in ("ca.crt", "server.crt", "server.key"))
    own = {"ssl_certfile": str(directory / "client.crt"), "ssl_keyfile": str(directory / "client.key")}
    arguments = ("--tls-ca-cert-file", ca, "--tls-cert-file", certificate, "--tls-key-file", key)
    return arguments, {"ssl": True, "ssl_check_hostname": False, "ssl_ca_certs": ca, **own}


@pytest.fixture(scope="module")
def server(servers, tmp_path_factory):
    arguments, client = servers
    try:
        with RedisServer(tmp_path_factory.mktemp("redis"), *arguments, tls=client) as server:
            yield server
    except RuntimeError as error:
        if "tls" not in str(error):
            raise
        pytest.skip("this redis-server was built without TLS")


@pytest.fixture
def opened(directory, server):
    """Open a database as configured, over the server or another address."""

    def open_database(address=server.address, **changes):
        own = {"tls_client_certificate": str(directory / "client.crt"), "tls_client_key": str(directory / "client.key")}
        settings = {"type": "redis_cluster", "address": address, "num_partitions": 4, "enable_tls": True, **own}
        settings["tls_ca_certificate"] = str(directory / "ca.crt")
        return RedisDatabase.from_config(VolatileDbConfig.model_validate({**settings, **changes}))

    return open_database


def test_many_vectors_go_through_it(opened):
    keys = distinct_keys(20_000)
    with closing(opened()) as database:
        database.open_table(TAG, 32)
        database.insert(TAG, keys, vectors_of(keys, 32))
        out, found = fetched(database, TAG, keys, 32)
        database.drop_table(TAG)
    assert found.all()
    np.testing.assert_array_equal(out, vectors_of(keys, 32))


def test_a_cluster_speaks_it_between_all_nodes(opened, servers, tmp_path):
    arguments, client = servers
    with RedisClusterServers(tmp_path, 3, *arguments, "--tls-cluster", "yes", tls=client) as cluster:
        assert works(opened(cluster.servers[0].address))


def test_a_directory_of_authorities_is_read(opened, directory, tmp_path):
    (tmp_path / "ca.pem").write_text((directory / "ca.crt").read_text())
    subprocess.run(["openssl", "rehash", str(tmp_path)], check=True, capture_output=True)
    assert works(opened(tls_ca_certificate=str(tmp_path)))


def test_what_does_not_fit_is_refused_with_the_reason(opened, directory, server):
    for changes, reason in (
        ({"tls_server_name_identification": "redis.example"}, "tls_server_name_identification"),
        ({"tls_ca_certificate": str(directory / "stranger.crt")}, "tls_ca_certificate"),  # the server is another's
        ({"tls_client_certificate": str(directory / "none"), "tls_client_key": str(directory / "none")}, server.address),
        ({"enable_tls": False}, server.address),
    ):
        with pytest.raises(DatabaseError, match=reason):
            opened(**changes)
    for key in ("tls_ca_certificate", "tls_client_key"):
        with pytest.raises(ConfigError, match=rf"(?s){key}.*/nowhere"):
            opened(**{key: "/nowhere"})


def test_tls_to_a_plain_server_is_an_error(opened, tmp_path, monkeypatch):
    monkeypatch.setitem(RedisDatabase.__init__.__kwdefaults__, "connect_timeout_s", 1.0)
    with RedisServer(tmp_path) as plain, pytest.raises(DatabaseError, match=r"TLS failed|longer than"):
        opened(plain.address)

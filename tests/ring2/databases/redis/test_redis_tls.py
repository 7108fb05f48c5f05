"""TLS, against real servers with certificates that the test makes."""

import subprocess

import numpy as np
import pytest

from hps.configuration.tiers import VolatileDbConfig
from hps.databases.redis.database import RedisDatabase
from hps.errors import ConfigError, DatabaseError
from hps.testing.databases import distinct_keys, fetched, vectors_of
from tests.ring1.databases.redis.test_redis_connections import works
from tests.servers.certificates import certificate
from tests.servers.redis_server import RedisClusterServers, RedisServer


@pytest.mark.redis
@pytest.mark.openssl
class TestTls:
    @pytest.fixture(scope="class")
    @classmethod
    def directory(cls, tmp_path_factory):
        directory = tmp_path_factory.mktemp("certificates")
        certificate(directory, "ca", "test authority")
        certificate(directory, "server", "redis.localhost", "ca")
        certificate(directory, "client", "hps", "ca")
        certificate(directory, "stranger", "another authority")
        return directory

    @pytest.fixture(scope="class")
    @classmethod
    def arguments(cls, directory):
        paths = {name: str(directory / f"{name}.{kind}") for name, kind in (("ca", "crt"), ("server", "crt"))}
        key = str(directory / "server.key")
        return ("--tls-ca-cert-file", paths["ca"], "--tls-cert-file", paths["server"], "--tls-key-file", key)

    @pytest.fixture(scope="class")
    @classmethod
    def client_settings(cls, directory):
        return {
            "ssl": True,
            "ssl_ca_certs": str(directory / "ca.crt"),
            "ssl_certfile": str(directory / "client.crt"),
            "ssl_keyfile": str(directory / "client.key"),
            "ssl_check_hostname": False,
        }

    @pytest.fixture(scope="class")
    @classmethod
    def server(cls, tmp_path_factory, arguments, client_settings):
        server = RedisServer(tmp_path_factory.mktemp("redis"), *arguments, tls=client_settings)
        try:
            with server:
                yield server
        except RuntimeError as error:
            if "tls" not in str(error):
                raise
            pytest.skip("this redis-server was built without TLS")

    def config(self, directory, address, **changes):
        settings = {
            "type": "redis_cluster",
            "address": address,
            "num_partitions": 4,
            "enable_tls": True,
            "tls_ca_certificate": str(directory / "ca.crt"),
            "tls_client_certificate": str(directory / "client.crt"),
            "tls_client_key": str(directory / "client.key"),
        }
        return VolatileDbConfig.model_validate({**settings, **changes})

    def test_vectors_go_through_it(self, directory, server):
        assert works(RedisDatabase.from_config(self.config(directory, server.address)))

    def test_many_vectors_go_through_it(self, directory, server):
        database = RedisDatabase.from_config(self.config(directory, server.address))
        keys = distinct_keys(40_000)
        database.open_table("hps_et.shop.large", 32)
        database.insert("hps_et.shop.large", keys, vectors_of(keys, 32))
        out, found = fetched(database, "hps_et.shop.large", keys, 32)
        assert found.all()
        np.testing.assert_array_equal(out, vectors_of(keys, 32))
        database.close()

    @pytest.mark.usefixtures("server")
    def test_a_cluster_speaks_it_between_all_nodes(self, directory, tmp_path, arguments, client_settings):
        cluster = RedisClusterServers(tmp_path, 3, *arguments, "--tls-cluster", "yes", tls=client_settings)
        with cluster:
            assert works(RedisDatabase.from_config(self.config(directory, cluster.servers[0].address)))

    def test_a_directory_of_authorities_is_read(self, directory, server, tmp_path):
        ca = (directory / "ca.crt").read_text()
        (tmp_path / "ca.pem").write_text(ca)
        subprocess.run(["openssl", "rehash", str(tmp_path)], check=True, capture_output=True, timeout=60)
        assert works(RedisDatabase.from_config(self.config(directory, server.address, tls_ca_certificate=str(tmp_path))))

    def test_a_server_of_another_name_is_refused(self, directory, server):
        config = self.config(directory, server.address, tls_server_name_identification="redis.example")
        with pytest.raises(DatabaseError, match="tls_server_name_identification"):
            RedisDatabase.from_config(config)

    def test_a_server_of_another_authority_is_refused(self, directory, server):
        config = self.config(directory, server.address, tls_ca_certificate=str(directory / "stranger.crt"))
        with pytest.raises(DatabaseError, match="tls_ca_certificate"):
            RedisDatabase.from_config(config)

    def test_the_server_wants_a_certificate_of_ours(self, directory, server):
        missing = {"tls_client_certificate": str(directory / "none"), "tls_client_key": str(directory / "none")}
        with pytest.raises(DatabaseError, match=server.address):
            RedisDatabase.from_config(self.config(directory, server.address, **missing))

    def test_plain_text_to_a_tls_server_is_an_error(self, server):
        with pytest.raises(DatabaseError, match=server.address):
            RedisDatabase(server.address)

    def test_tls_to_a_plain_server_is_an_error(self, directory, tmp_path, monkeypatch):
        monkeypatch.setitem(RedisDatabase.__init__.__kwdefaults__, "connect_timeout_s", 1.0)
        with RedisServer(tmp_path) as plain, pytest.raises(DatabaseError, match=r"TLS failed|longer than"):
            RedisDatabase.from_config(self.config(directory, plain.address))

    @pytest.mark.parametrize("key", ["tls_ca_certificate", "tls_client_key"])
    def test_a_file_that_is_missing_is_named(self, directory, key):
        with pytest.raises(ConfigError, match=rf"(?s){key}.*/nowhere"):
            RedisDatabase.from_config(self.config(directory, "127.0.0.1:1", **{key: "/nowhere"}))

"""TLS contexts: which files are taken, and the names in a client's certificate."""

import logging
import ssl
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from hps.configuration.load import ServiceConfig
from hps.errors import ConfigError
from hps.service.fronts.tls import TLS, context_of, names_in
from tests.servers.certificates import Authority


def settings(certificate: Path, key: Path | str = "", ca: Path | str = "") -> ServiceConfig:
    return ServiceConfig(tls_certificate_path=str(certificate), tls_key_path=str(key), tls_client_ca_path=str(ca))


def test_a_key_may_lie_beside_its_certificate_or_in_its_file(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair = authority.sign("server")
    for one in (settings(pair.certificate, pair.key), settings(pair.both), settings(pair.both, ca=authority.path)):
        context = context_of(one)
        assert context.minimum_version == ssl.TLSVersion.TLSv1_2
        assert context.verify_mode == (ssl.CERT_REQUIRED if one.tls_client_ca_path else ssl.CERT_NONE)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("the key of another", "tls_certificate_path: cannot use .*: KEY_VALUES_MISMATCH; expected PEM files"),
        ("no key", "tls_certificate_path: cannot use .*PEM"),
        ("an encrypted key", "tls_certificate_path: cannot use .*; expected PEM files"),
        ("an empty file", "tls_certificate_path: cannot use .*PEM"),
        ("no authority", "tls_client_ca_path: cannot use .*NO_CERTIFICATE_OR_CRL_FOUND"),
        ("no file", "tls_certificate_path: cannot use .*: No such file or directory"),
    ],
)
def test_files_that_cannot_be_used_are_named(tmp_path: Path, wrong: str, says: str) -> None:
    authority = Authority(tmp_path)
    pair, other = authority.sign("server"), authority.sign("other")
    key = serialization.load_pem_private_key(pair.key.read_bytes(), None)
    form, protected = serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"secret")
    (tmp_path / "encrypted").write_bytes(key.private_bytes(serialization.Encoding.PEM, form, protected))
    (tmp_path / "empty").write_text("")
    one = {
        "the key of another": settings(pair.certificate, other.key),
        "no key": settings(pair.certificate),
        "an encrypted key": settings(pair.certificate, tmp_path / "encrypted"),
        "an empty file": settings(tmp_path / "empty"),
        "no authority": settings(pair.both, ca=tmp_path / "empty"),
        "no file": settings(tmp_path / "nowhere"),
    }[wrong]
    with pytest.raises(ConfigError, match=says):
        context_of(one)


def test_a_new_pair_is_taken_over_and_a_wrong_one_is_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    authority = Authority(tmp_path)
    pair = authority.sign("server")
    tls = TLS(settings(pair.certificate, pair.key))
    first = tls._context
    with caplog.at_level(logging.INFO):
        for key in (authority.sign("other").key.read_text(), None):
            if key is None:
                authority.sign("server")
            else:
                pair.key.write_text(key)
            for _ in range(3):
                tls.look()
            assert (tls._context is first) == (key is not None)
    levels = [(one.levelname, one.message.partition(" in ")[0].partition(":")[0]) for one in caplog.records]
    assert levels == [
        ("ERROR", "new connections go on with the certificate as it was"),
        ("INFO", "new connections use the certificate"),
    ]


def test_the_names_in_a_certificate_are_its_common_name_and_the_alternative_ones() -> None:
    subject = ((("organizationName", "hps"),), (("commonName", "ranker"),))
    alternative = (("DNS", "ranker.example"), ("URI", "spiffe://x/ranker"), ("IP Address", "10.0.0.1"), ("DNS", "ranker"))
    found = names_in({"subject": subject, "subjectAltName": alternative})
    assert found == ("ranker", "ranker.example", "spiffe://x/ranker")
    assert names_in(None) == names_in({}) == ()

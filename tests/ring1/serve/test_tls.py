"""TLS contexts: which files are taken, and the names in a client's certificate."""

import logging
import ssl
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from hps.configuration.load import ServiceConfig
from hps.errors import ConfigError
from hps.serve.frontend.tls import TLS, context_of, expiry_of, names_in
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


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair, other = authority.sign("server"), authority.sign("other")
    key = serialization.load_pem_private_key(pair.key.read_bytes(), None)
    form, protected = serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"secret")
    encrypted, empty = tmp_path / "encrypted", tmp_path / "empty"
    encrypted.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, protected))
    empty.write_text("")
    for wrong, says in (
        (settings(pair.certificate, other.key), "tls_certificate_path: cannot use .*: KEY_VALUES_MISMATCH; expected PEM files"),
        (settings(pair.certificate), "tls_certificate_path: cannot use .*PEM"),
        (settings(pair.certificate, encrypted), "tls_certificate_path: cannot use .*; expected PEM files"),
        (settings(empty), "tls_certificate_path: cannot use .*PEM"),
        (settings(pair.both, ca=empty), "tls_client_ca_path: cannot use .*NO_CERTIFICATE_OR_CRL_FOUND"),
        (settings(tmp_path / "nowhere"), "tls_certificate_path: cannot use .*: No such file or directory"),
    ):
        with pytest.raises(ConfigError, match=says):
            context_of(wrong)


def test_a_new_pair_is_taken_over_and_a_wrong_one_is_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    authority = Authority(tmp_path)
    pair = authority.sign("server")
    tls = TLS(settings(pair.certificate, pair.key))
    first, other = tls._context, authority.sign("other").key.read_text()
    with caplog.at_level(logging.INFO):
        for change in (lambda: pair.key.write_text(other), lambda: authority.sign("server")):
            assert tls._context is first
            change()
            for _ in range(3):
                tls.poll()
        assert tls._context is not first
    levels = [(record.levelname, record.message.partition(" in ")[0].partition(":")[0]) for record in caplog.records]
    assert levels == [
        ("ERROR", "new connections keep the previous certificate"),
        ("INFO", "new connections use the certificate"),
    ]


def test_the_names_in_a_certificate_are_its_common_name_and_the_alternative_ones() -> None:
    subject = ((("organizationName", "hps"),), (("commonName", "ranker"),))
    alternative = (("DNS", "ranker.example"), ("URI", "spiffe://x/ranker"), ("IP Address", "10.0.0.1"), ("DNS", "ranker"))
    found = names_in({"subject": subject, "subjectAltName": alternative})
    assert found == ("ranker", "ranker.example", "spiffe://x/ranker")
    assert names_in(None) == names_in({}) == ()


@pytest.mark.parametrize("days", [-1, 2, 30])
@pytest.mark.parametrize("verifies_clients", [False, True])
def test_the_end_of_a_certificate_is_known_also_of_one_that_has_expired(
    tmp_path: Path, days: int, verifies_clients: bool, caplog: pytest.LogCaptureFixture
) -> None:
    authority = Authority(tmp_path)
    pair = authority.sign("server", days=days)
    tls = TLS(settings(pair.both, ca=authority.path if verifies_clients else ""))
    assert tls.expires_at == x509.load_pem_x509_certificate(pair.certificate.read_bytes()).not_valid_after_utc.timestamp()
    for _ in range(3):
        tls.poll()
    assert [record.levelname for record in caplog.records if "replace it" in record.getMessage()] == ["WARNING"] * (days < 3)
    authority.sign("server", days=90)
    for _ in range(3):
        tls.poll()
    assert tls.expires_at == x509.load_pem_x509_certificate(pair.certificate.read_bytes()).not_valid_after_utc.timestamp()


def test_a_certificate_that_the_file_does_not_have_has_no_known_end(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair, other = authority.sign("server"), authority.sign("other")
    assert expiry_of(context_of(settings(pair.both)), str(other.certificate)) is None

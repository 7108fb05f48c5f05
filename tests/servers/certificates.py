"""Certificates for tests: an authority, and what it signs."""

import datetime
import ipaddress
import subprocess
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


class Pair(NamedTuple):
    """Files of a certificate and its key, and one of both."""

    certificate: Path
    key: Path
    both: Path


class Authority:
    """An authority that signs certificates.

    Attributes:
        path: file of its own certificate.
    """

    def __init__(self, directory: Path, name: str = "test authority") -> None:
        self._directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(name)
        own = self._builder(self._name, self._key.public_key(), 1).issuer_name(self._name)
        usage = x509.KeyUsage(True, False, False, False, False, True, True, False, False)
        key = x509.SubjectKeyIdentifier.from_public_key(self._key.public_key())
        own = own.add_extension(x509.BasicConstraints(True, None), True).add_extension(usage, True).add_extension(key, False)
        self.path = directory / f"{name.replace(' ', '-')}.pem"
        self.path.write_bytes(own.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))

    def sign(self, name: str, file: str = "", *, also: tuple[str, ...] = (), days: int = 30) -> Pair:
        """Make a certificate for a name and for 127.0.0.1.

        Args:
            file: name of the files, replaced if they are there; `name` by default.
            also: URIs that the certificate names, too.
            days: how long it is valid; a negative one has expired.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        names = [
            x509.DNSName(name),
            x509.IPAddress(ipaddress.ip_address("127.0.0.1")),
            *map(x509.UniformResourceIdentifier, also),
        ]
        made = self._builder(_name(name), key.public_key(), days).issuer_name(self._name)
        made = made.add_extension(x509.SubjectAlternativeName(names), False)
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        made = made.add_extension(issuer, False).add_extension(x509.BasicConstraints(False, None), True)
        certificate = made.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        start = self._directory / (file or name)
        pair = Pair(*(start.with_name(f"{start.name}.{end}") for end in ("crt", "key", "pem")))
        for path, content in zip(pair, (certificate, private, certificate + private), strict=True):
            path.write_bytes(content)
        return pair

    @staticmethod
    def _builder(name: x509.Name, key: ec.EllipticCurvePublicKey, days: int) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        day = datetime.timedelta(days=1)
        builder = x509.CertificateBuilder().subject_name(name).public_key(key).serial_number(x509.random_serial_number())
        return builder.not_valid_before(now - abs(days) * 2 * day).not_valid_after(now + days * day)


def _name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def certificate(directory: Path, name: str, subject: str, signer: str | None = None) -> tuple[str, str]:
    """Make a key and a certificate with openssl; signed by itself, as an authority is, without a signer."""
    key, request, made = (directory / f"{name}.{kind}" for kind in ("key", "csr", "crt"))
    extension = directory / f"{name}.ext"
    extension.write_text(f"subjectAltName=DNS:{subject}\n" if signer else "basicConstraints=critical,CA:TRUE\n")

    def openssl(*arguments: object) -> None:
        subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, timeout=60)

    openssl("req", "-new", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", request, "-subj", f"/CN={subject}")
    issuer = ("-CA", directory / f"{signer}.crt", "-CAkey", directory / f"{signer}.key", "-CAcreateserial")
    issuer = issuer if signer else ("-signkey", key)
    openssl("x509", "-req", "-in", request, "-days", 2, "-out", made, "-extfile", extension, *issuer)
    return str(made), str(key)

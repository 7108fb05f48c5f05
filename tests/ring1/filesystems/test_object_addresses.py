"""Addresses of objects are taken apart, and none that is no address; and the parts of an upload. Without any store."""

import pytest

from hps.errors import ModelFileError
from hps.filesystems.gcs import gcs_address
from hps.filesystems.object_store import ObjectAddress
from hps.filesystems.s3 import part_bytes, s3_address

AWS = "amazonaws.com"


@pytest.mark.parametrize(
    ("uri", "bucket", "key", "region"),
    [
        *(("s3://bucket/key", "bucket", "key", ""), ("s3a://bucket/a/b/key", "bucket", "a/b/key", "")),
        *(("S3://my.dotted.Old_Bucket/a/key", "my.dotted.Old_Bucket", "a/key", ""), ("s3://bucket", "bucket", "", "")),
        *(("s3://bucket//", "bucket", "", ""), ("s3://bucket/model/", "bucket", "model", "")),
        *(("s3://bucket//a//b", "bucket", "/a//b", ""), ("s3://bucket/a%20b?\nc#d", "bucket", "a%20b?\nc#d", "")),
        (f"https://bucket.s3.us-west-2.{AWS}/", "bucket", "", "us-west-2"),
        (f"HTTPS://bucket.S3.eu-central-1.{AWS}/a/key", "bucket", "a/key", "eu-central-1"),
        (f"https://my.dotted.bucket.s3.us-west-2.{AWS}/key", "my.dotted.bucket", "key", "us-west-2"),
        (f"https://s3.us-west-2.{AWS}/my.dotted.bucket/a/key", "my.dotted.bucket", "a/key", "us-west-2"),
        (f"https://s3.us-west-2.{AWS}/bucket", "bucket", "", "us-west-2"),
        (f"https://bucket.s3.us-gov-west-1.{AWS}:443/key", "bucket", "key", "us-gov-west-1"),
        (f"https://bucket.s3.{AWS}/key", "bucket", "key", ""),
        (f"https://s3.{AWS}/bucket/key", "bucket", "key", ""),
        (f"https://bucket.s3-eu-west-1.{AWS}/key", "bucket", "key", "eu-west-1"),
        (f"https://s3-eu-west-1.{AWS}/bucket/key", "bucket", "key", "eu-west-1"),
        (f"https://bucket.s3.dualstack.eu-west-1.{AWS}/key", "bucket", "key", "eu-west-1"),
        (f"https://bucket.s3.cn-north-1.{AWS}.cn/key", "bucket", "key", "cn-north-1"),
        (f"https://s3.s3.us-west-2.{AWS}/key", "s3", "key", "us-west-2"),
        (f"https://bucket.s3.us-west-2.{AWS}/a%20b%2Fc/d+e%3F%C3%BC", "bucket", "a b/c/d+e?ü", "us-west-2"),
    ],
)
def test_bucket_key_and_region_of_an_s3_address_are_found(uri: str, bucket: str, key: str, region: str) -> None:
    assert s3_address(uri) == ObjectAddress(uri, bucket, key, region)


@pytest.mark.parametrize(
    ("uri", "why"),
    [
        *((uri, "names no bucket") for uri in ("s3://", "s3:///key", f"https://s3.us-west-2.{AWS}/", f"https://s3.{AWS}")),
        *((uri, "no address of an S3 object") for uri in ("s3:bucket/key", "gs://bucket/key", f"http://s3.{AWS}/bucket/key")),
        *((f"s3://{name}/key", f"no bucket can be called '{name}'") for name in ("b", "bad bucket", "bucket:9000")),
        ("https://example.com/bucket/key", "'example.com' is no host of S3"),
        (f"https://bucket.s3.us-west-2.{AWS}.evil.org/key", "is no host of S3"),
        (f"https://ec2.us-west-2.{AWS}/key", "is no host of S3"),
        (f"https://bucket.s3-accelerate.{AWS}/key", "is no host of S3"),
        (f"https://bucket.s3.us-west-2.{AWS}:444/key", "is no host of S3"),
        (f"https://bucket.s3.us-west-2.{AWS}/%ff", "do not decode to UTF-8"),
        ("s3://bucket/surrogate\ud800", "no UTF-8 form"),
    ],
)
def test_what_is_no_s3_address_is_refused_by_its_name(uri: str, why: str) -> None:
    with pytest.raises(ModelFileError, match=why) as raised:
        s3_address(uri)
    assert uri.encode("ascii", "backslashreplace").decode() in str(raised.value)
    assert "expected s3://bucket/key, https://bucket.s3.region.amazonaws.com/key or" in str(raised.value)


@pytest.mark.parametrize(
    "uri",
    [
        *("s3://AKIAUSER:secret@bucket/key", "s3://AKIAUSER:sec/secret/secret@bucket/key"),
        f"https://user:secret@bucket.s3.us-west-2.{AWS}/key",
        f"https://bucket.s3.us-west-2.{AWS}/key?X-Amz-Signature=secret&X-Amz-Credential=AKIAUSER",
        f"https://bucket.s3.us-west-2.{AWS}/key?versionId=secret\nAKIAUSER",
        *(f"https://{host}?X-Amz-Signature=secret" for host in (f"bucket.s3.us-west-2.{AWS}", "example.org")),
        "https://AKIAUSER:secret@example.org/key?X-Amz-Signature=secret#secret",
        f"https://AKIAUSER:secret@bucket.s3.us-west-2.{AWS}/%ff?secret",
    ],
)
def test_what_may_be_secret_in_an_s3_address_is_not_repeated(uri: str) -> None:
    with pytest.raises(ModelFileError) as raised:
        s3_address(uri)
    assert not any(secret in str(raised.value) for secret in ("secret", "AKIAUSER"))


@pytest.mark.parametrize(
    ("uri", "bucket", "name"),
    [
        *(("gs://my-bucket/models/key", "my-bucket", "models/key"), ("GS://my-bucket", "my-bucket", "")),
        *(("gs://a.dotted.bucket/key", "a.dotted.bucket", "key"), ("gs://my-bucket/models//", "my-bucket", "models")),
        ("gs://my-bucket/100%25 of it?#x", "my-bucket", "100%25 of it?#x"),
        ("https://storage.googleapis.com/my-bucket/models/key", "my-bucket", "models/key"),
        ("https://storage.cloud.google.com/my-bucket/models/key", "my-bucket", "models/key"),
        ("https://a.dotted.bucket.storage.googleapis.com/models/key", "a.dotted.bucket", "models/key"),
        ("HTTPS://Storage.GoogleAPIs.com:443/my-bucket/a%20b%2Fc%25/%C3%A9", "my-bucket", "a b/c%/é"),
    ],
)
def test_bucket_and_name_of_a_gcs_address_are_found(uri: str, bucket: str, name: str) -> None:
    assert gcs_address(uri) == ObjectAddress(uri, bucket, name)


@pytest.mark.parametrize(
    ("uri", "why"),
    [
        *((f"gs://{rest}", "no address") for rest in ("", "/models/key", "My_Bucket/key", "user@bucket/key", "bucket:80/key")),
        *(
            ("gs://bucket/..", "no object can have"),
            ("gs://bucket/a\nb", "no object can have"),
            ("gs://bucket/\udcff", "Unicode"),
        ),
        ("https://storage.googleapis.com/bucket/%FF", "Unicode"),
        ("https://storage.googleapis.com/", "no address"),
        ("https://user:SECRET@storage.googleapis.com/bucket/key?X-Goog-Signature=SECRET", "signed links"),
        ("https://bucket.storage.googleapis.com/key#SECRET", "signed links"),
        ("https://storage.googleapis.com:8443/bucket/key", "gcs_endpoint_url"),
        ("http://storage.googleapis.com/bucket/key", "gcs_endpoint_url"),
        ("https://bucket.storage.cloud.google.com/key", "no address"),
        ("https://storage.googleapis.com:port/bucket/key", "no address"),
    ],
)
def test_what_is_no_gcs_address_is_an_error_that_says_why(uri: str, why: str) -> None:
    with pytest.raises(ModelFileError, match=why) as error:
        gcs_address(uri)
    assert "SECRET" not in str(error.value)


def test_parts_grow_so_that_ten_thousand_hold_five_terabytes() -> None:
    sizes = [part_bytes(number) for number in range(10_000)]
    assert sizes[0] == max(sizes[:1000]) == 8 << 20  # models of usual size need little memory
    assert sum(sizes) >= 5 << 40
    assert max(sizes) <= 5 << 30

"""Addresses of objects are taken apart, and none that is no address, without any store."""

import pytest

from hps.errors import ModelFileError
from hps.filesystems.gcs import gcs_address
from hps.filesystems.object_store import ObjectAddress
from hps.filesystems.s3 import s3_address


@pytest.mark.parametrize(
    ("uri", "bucket", "key", "region"),
    [
        ("s3://bucket/key", "bucket", "key", ""),
        ("S3://bucket/key", "bucket", "key", ""),
        ("s3a://bucket/a/b/key", "bucket", "a/b/key", ""),
        ("s3://my.dotted.bucket/a/key", "my.dotted.bucket", "a/key", ""),
        ("s3://bucket", "bucket", "", ""),
        ("s3://bucket/", "bucket", "", ""),
        ("s3://bucket//", "bucket", "", ""),
        ("https://bucket.s3.us-west-2.amazonaws.com/", "bucket", "", "us-west-2"),
        ("s3://bucket/model/", "bucket", "model", ""),
        ("s3://bucket/a%20b?c#d", "bucket", "a%20b?c#d", ""),
        ("s3://bucket//a//b", "bucket", "/a//b", ""),
        ("s3://bucket/a\nb", "bucket", "a\nb", ""),
        ("s3://Old_Bucket/key", "Old_Bucket", "key", ""),
        ("https://bucket.s3.eu-central-1.amazonaws.com/a/key", "bucket", "a/key", "eu-central-1"),
        ("HTTPS://bucket.S3.eu-central-1.amazonaws.com/a/key", "bucket", "a/key", "eu-central-1"),
        ("https://my.dotted.bucket.s3.us-west-2.amazonaws.com/key", "my.dotted.bucket", "key", "us-west-2"),
        ("https://s3.us-west-2.amazonaws.com/bucket/a/key", "bucket", "a/key", "us-west-2"),
        ("https://s3.us-west-2.amazonaws.com/my.dotted.bucket/key", "my.dotted.bucket", "key", "us-west-2"),
        ("https://s3.us-west-2.amazonaws.com/bucket", "bucket", "", "us-west-2"),
        ("https://bucket.s3.us-gov-west-1.amazonaws.com:443/key", "bucket", "key", "us-gov-west-1"),
        ("https://bucket.s3.amazonaws.com/key", "bucket", "key", ""),
        ("https://s3.amazonaws.com/bucket/key", "bucket", "key", ""),
        ("https://bucket.s3-eu-west-1.amazonaws.com/key", "bucket", "key", "eu-west-1"),
        ("https://s3-eu-west-1.amazonaws.com/bucket/key", "bucket", "key", "eu-west-1"),
        ("https://bucket.s3.dualstack.eu-west-1.amazonaws.com/key", "bucket", "key", "eu-west-1"),
        ("https://bucket.s3.cn-north-1.amazonaws.com.cn/key", "bucket", "key", "cn-north-1"),
        ("https://s3.s3.us-west-2.amazonaws.com/key", "s3", "key", "us-west-2"),
        ("https://bucket.s3.us-west-2.amazonaws.com/a%20b%2Fc/d+e", "bucket", "a b/c/d+e", "us-west-2"),
        ("https://s3.us-west-2.amazonaws.com/bucket/Gr%C3%BC%C3%9Fe", "bucket", "Grüße", "us-west-2"),
        ("https://bucket.s3.us-west-2.amazonaws.com/what%3F", "bucket", "what?", "us-west-2"),
    ],
)
def test_bucket_key_and_region_of_an_s3_address_are_found(uri: str, bucket: str, key: str, region: str) -> None:
    assert s3_address(uri) == ObjectAddress(uri, bucket, key, region)


@pytest.mark.parametrize(
    ("uri", "why"),
    [
        ("s3://", "names no bucket"),
        ("s3:///key", "names no bucket"),
        ("https://s3.us-west-2.amazonaws.com/", "names no bucket"),
        ("https://s3.us-west-2.amazonaws.com", "names no bucket"),
        ("s3:bucket/key", "no address of an S3 object"),
        ("gs://bucket/key", "no address of an S3 object"),
        ("http://s3.us-west-2.amazonaws.com/bucket/key", "no address of an S3 object"),
        ("s3://b/key", "no bucket can be called 'b'"),
        ("s3://bad bucket/key", "no bucket can be called 'bad bucket'"),
        ("s3://bucket:9000/key", "no bucket can be called 'bucket:9000'"),
        ("https://example.com/bucket/key", "'example.com' is no host of S3"),
        ("https://bucket.s3.us-west-2.amazonaws.com.evil.org/key", "is no host of S3"),
        ("https://ec2.us-west-2.amazonaws.com/key", "is no host of S3"),
        ("https://bucket.s3-accelerate.amazonaws.com/key", "is no host of S3"),
        ("https://bucket.s3.us-west-2.amazonaws.com:444/key", "is no host of S3"),
        ("https://bucket.s3.us-west-2.amazonaws.com/%ff", "do not decode to UTF-8"),
        ("s3://bucket/surrogate\ud800", "no UTF-8 form"),
    ],
)
def test_what_is_no_s3_address_is_refused_by_its_name(uri: str, why: str) -> None:
    with pytest.raises(ModelFileError, match=why) as raised:
        s3_address(uri)
    shown = uri.encode("ascii", "backslashreplace").decode() if "\ud800" in uri else uri
    assert shown in str(raised.value)
    assert "expected s3://bucket/key, https://bucket.s3.region.amazonaws.com/key or" in str(raised.value)


@pytest.mark.parametrize(
    "uri",
    [
        "s3://AKIAUSER:secret@bucket/key",
        "s3://AKIAUSER:sec/secret/secret@bucket/key",
        "https://user:secret@bucket.s3.us-west-2.amazonaws.com/key",
        "https://bucket.s3.us-west-2.amazonaws.com/key?X-Amz-Signature=secret&X-Amz-Credential=AKIAUSER",
        "https://bucket.s3.us-west-2.amazonaws.com/key?versionId=secret\nAKIAUSER",
        "https://bucket.s3.us-west-2.amazonaws.com?X-Amz-Signature=secret",
        "https://example.org?X-Amz-Signature=secret",
        "https://AKIAUSER:secret@example.org/key?X-Amz-Signature=secret#secret",
        "https://AKIAUSER:secret@bucket.s3.us-west-2.amazonaws.com/%ff?secret",
    ],
)
def test_what_may_be_secret_in_an_s3_address_is_not_repeated(uri: str) -> None:
    with pytest.raises(ModelFileError) as raised:
        s3_address(uri)
    assert "secret" not in str(raised.value)
    assert "AKIAUSER" not in str(raised.value)


@pytest.mark.parametrize(
    ("uri", "bucket", "name"),
    [
        ("gs://my-bucket/models/key", "my-bucket", "models/key"),
        ("GS://my-bucket/models/key", "my-bucket", "models/key"),
        ("gs://a.dotted.bucket/key", "a.dotted.bucket", "key"),
        ("gs://my-bucket", "my-bucket", ""),
        ("gs://my-bucket/", "my-bucket", ""),
        ("gs://my-bucket/models//", "my-bucket", "models"),
        ("gs://my-bucket/100%25 of it?#x", "my-bucket", "100%25 of it?#x"),
        ("https://storage.googleapis.com/my-bucket/models/key", "my-bucket", "models/key"),
        ("https://storage.cloud.google.com/my-bucket/models/key", "my-bucket", "models/key"),
        ("https://my-bucket.storage.googleapis.com/models/key", "my-bucket", "models/key"),
        ("https://a.dotted.bucket.storage.googleapis.com/key", "a.dotted.bucket", "key"),
        ("HTTPS://Storage.GoogleAPIs.com:443/my-bucket/key", "my-bucket", "key"),
        ("https://storage.googleapis.com/my-bucket/a%20b%2Fc%25/%C3%A9", "my-bucket", "a b/c%/é"),
    ],
)
def test_bucket_and_name_of_a_gcs_address_are_found(uri: str, bucket: str, name: str) -> None:
    assert gcs_address(uri) == ObjectAddress(uri, bucket, name)


@pytest.mark.parametrize(
    ("uri", "why"),
    [
        ("gs://", "no address"),
        ("gs:///models/key", "no address"),
        ("gs://My_Bucket/key", "no address"),
        ("gs://user@bucket/key", "no address"),
        ("gs://bucket:80/key", "no address"),
        ("gs://bucket/..", "no object can have"),
        ("gs://bucket/a\nb", "no object can have"),
        ("gs://bucket/\udcff", "Unicode"),
        ("https://storage.googleapis.com/bucket/%FF", "Unicode"),
        ("https://storage.googleapis.com/", "no address"),
        ("https://storage.googleapis.com/bucket/key?X-Goog-Signature=SECRET", "signed links"),
        ("https://bucket.storage.googleapis.com/key#SECRET", "signed links"),
        ("https://user:SECRET@storage.googleapis.com/bucket/key?X-Goog-Signature=SECRET", "signed links"),
        ("https://storage.googleapis.com:8443/bucket/key", "gcs_endpoint_url"),
        ("https://bucket.storage.cloud.google.com/key", "no address"),
        ("https://storage.googleapis.com:port/bucket/key", "no address"),
        ("http://storage.googleapis.com/bucket/key", "gcs_endpoint_url"),
    ],
)
def test_what_is_no_gcs_address_is_an_error_that_says_why(uri: str, why: str) -> None:
    with pytest.raises(ModelFileError, match=why) as error:
        gcs_address(uri)
    assert "SECRET" not in str(error.value)

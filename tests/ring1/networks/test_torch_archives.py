"""Archives of PyTorch: what is refused before PyTorch reads it."""

import io
import struct
import tracemalloc
import warnings
import zipfile

import pytest

import hps

pytest.importorskip("torch")
from hps.networks.torch_archives import archive_of, member_names, members


def archive(*named: tuple[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as written, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of names twice
        for name, content in named:
            written.writestr(name, content)
    return file.getvalue()


def test_members_are_read_without_the_directory_that_they_share_and_written_again() -> None:
    content = archive(("m/version", b"1"), ("m/data/0", b"abc"))
    found = members("f", content)
    assert found == {"version": b"1", "data/0": b"abc"}
    assert members("f", archive_of(dict(found)).getvalue()) == found
    rest = dict(found)
    archive_of(rest)
    assert not rest
    assert members("f", archive(("version", b"1"), ("data/0", b"abc"))) == found
    assert member_names("f", content) == ["m/version", "m/data/0"]


@pytest.mark.parametrize("names", [("m/a", "m/a"), ("m/a", "m/A")], ids=["the same", "in another case"])
def test_a_name_twice_is_refused(names: tuple[str, str]) -> None:
    """One reader takes the first, another the last."""
    with pytest.raises(hps.ModelFileError, match="got a name twice in its archive"):
        members("f", archive(*((name, bytes([place])) for place, name in enumerate(names))))


@pytest.mark.parametrize("name", ["m/../../x", "/x", "m//x", "m/./x", 'm/"x', "m/'x", "m/a\\b"])
def test_names_that_are_no_places_in_the_archive_are_refused(name: str) -> None:
    with pytest.raises(hps.ModelFileError, match="expected tensors and JSON alone"):
        members("f", archive(("m/version", b"1"), (name, b"")))


def test_an_archive_that_expands_without_measure_is_refused_unread() -> None:
    bomb = archive(("m/data/0", bytes((64 << 20) + (1 << 20))), compression=zipfile.ZIP_DEFLATED)
    with pytest.raises(hps.ModelFileError, match="got members of far more bytes than the file has"):
        members("f", bomb)


def test_members_expand_no_further_than_they_say() -> None:
    """The size in the archive's directory is what its writer claims."""
    content = archive(("m/data/0", bytes(64 << 20)), compression=zipfile.ZIP_DEFLATED)
    claims = content.rindex(b"PK\x01\x02") + 24
    tracemalloc.start()
    try:
        with pytest.raises(hps.ModelFileError, match="got a file that is no archive of PyTorch"):
            members("f", content[:claims] + struct.pack("<I", 10) + content[claims + 4 :])
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("compression", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_members_that_expand_without_bounds_are_refused_unread(compression: int) -> None:
    """PyTorch writes none of these; 700 bytes of bzip2 are 700 MB."""
    with pytest.raises(hps.ModelFileError, match=r"'m/data/0' is compressed by method 1[24]"):
        members("f", archive(("m/data/0", bytes(1000)), compression=compression))


@pytest.mark.parametrize(
    "damage", [lambda content: content[: len(content) // 2], lambda content: content.replace(b"abc", b"abd", 1)]
)
def test_a_damaged_archive_is_refused(damage: object) -> None:
    with pytest.raises(hps.ModelFileError, match="got a file that is no archive of PyTorch"):
        members("f", damage(archive(("m/version", b"1"), ("m/data/0", b"abc"))))  # type: ignore[operator]

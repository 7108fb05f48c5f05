"""Objects in S3, without any store; ring2/filesystems/test_s3.py asks moto's server."""

from hps.filesystems.s3 import part_bytes


def test_parts_grow_so_that_ten_thousand_hold_five_terabytes() -> None:
    sizes = [part_bytes(number) for number in range(10_000)]
    assert sizes[0] == 8 << 20
    assert sum(sizes) >= 5 << 40
    assert max(sizes) <= 5 << 30
    assert max(sizes[:1000]) == 8 << 20  # models of usual size need little memory

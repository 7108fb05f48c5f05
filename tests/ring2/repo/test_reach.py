"""Which tests a change can reach."""

import pytest

from tests.reach import files_that_reach, imported

FLEET, S3 = "tests/ring2/versions/test_fleet.py", "tests/ring2/filesystems/test_s3_faults.py"


def test_a_change_reaches_what_imports_it_and_of_what_everything_depends_on_nothing_is_told() -> None:
    for changed in ("hps/filesystems/s3.py", "hps/ground/rows.py", "tests/servers/misbehaving_proxy.py", S3):
        assert files_that_reach([changed], [S3]) == [S3], changed
    for changed in ("hps/serve/frontend/grpc_server.py", "docs/fleet.md", FLEET):
        assert files_that_reach([changed], [S3]) == [], changed
    for changed in ("pyproject.toml", "Makefile", "hps/gone.py", "cuda/query.cu", "tests/conftest.py"):
        assert files_that_reach([changed], [S3]) is None, changed


@pytest.mark.parametrize(
    ("source", "module"),
    [
        ("def test():\n    from hps.tools.cli.server import top", "hps.tools.cli.server.top"),
        ("import hps\nhps.HPS({})", "hps.parameter_server"),
        ("run([python, '-m', 'hps', 'serve'])", "hps.tools.cli.server.serve"),
        ("run('import hps\\nhps.connect(1)')", "hps.client.client"),
    ],
)
def test_every_way_to_import_is_seen(source: str, module: str) -> None:
    assert module in set(imported(source))

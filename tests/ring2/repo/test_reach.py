"""Which tests a change can reach."""

import pytest

from tests.reach import files_that_reach, imported

FLEET = "tests/ring2/versions/test_fleet.py"
S3 = "tests/ring2/filesystems/test_s3_faults.py"


@pytest.mark.parametrize(
    ("changed", "test", "found"),
    [
        (["hps/versions/fleet.py"], FLEET, True),
        (["hps/ground/rows.py"], FLEET, True),  # below all
        (["hps/filesystems/s3.py"], S3, True),
        (["hps/service/fronts/http2.py"], S3, False),
        ([S3], S3, True),
        ([S3], FLEET, False),
        (["tests/servers/misbehaving_proxy.py"], S3, True),
    ],
)
def test_a_change_reaches_what_imports_it(changed: list[str], test: str, found: bool) -> None:
    assert files_that_reach(changed, [test]) == [test] * found


@pytest.mark.parametrize("path", ["pyproject.toml", "Makefile", ".ci/run", "hps/gone.py", "cuda/query.cu", "tests/conftest.py"])
def test_of_what_everything_depends_on_nothing_is_told(path: str) -> None:
    assert files_that_reach([path], [S3]) is None


@pytest.mark.parametrize(
    ("source", "module"),
    [
        ("def test():\n    from hps.cli import top", "hps.cli.top"),
        ("import hps\nhps.HPS({})", "hps.parameter_server"),
        ("from hps import HPS", "hps.parameter_server"),
        ("run([python, '-m', 'hps', 'serve'])", "hps.cli.serve"),
        ("run('import hps\\nhps.connect(1)')", "hps.client.client"),
        ("patch('hps.filesystems.retries._PAUSE')", "hps.filesystems.retries._PAUSE"),
    ],
)
def test_every_way_to_import_is_seen(source: str, module: str) -> None:
    assert module in set(imported(source))

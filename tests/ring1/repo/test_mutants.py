"""Each bug of tests/nightly/mutants.toml still has its place in the code: `make test-slow` puts some of them there."""

from tests.nightly.mutants import find_mutants


def test_no_mutant_is_stale():
    mutants, stale = find_mutants()
    assert stale == []
    assert len(mutants) > 50

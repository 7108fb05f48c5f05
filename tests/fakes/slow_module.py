"""A module whose import waits until the test lets it go on, as one does that reads a dictionary of a gigabyte."""

from hps.testing.waiting import PATIENCE_S
from tests.fakes import transforms

if not transforms.IMPORTED.wait(PATIENCE_S):
    raise TimeoutError("the import has waited for nothing")

first = transforms.first

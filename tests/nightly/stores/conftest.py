"""The Redis server and the place of ring 1."""

from tests.ring1.stores.conftest import client as client
from tests.ring1.stores.conftest import path as path
from tests.ring1.stores.conftest import server as server

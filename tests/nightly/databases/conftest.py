"""The Redis server and the place of ring 1."""

from tests.ring1.databases.conftest import client as client
from tests.ring1.databases.conftest import path as path
from tests.ring1.databases.conftest import server as server

"""Two processes that share a Redis, against a dict: whatever one does, both read."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from hps.databases.redis.database import RedisDatabase
from hps.errors import UnknownTableError
from hps.testing.databases import vectors_of

TAG, DIM, PARTITIONS = "hps_et.shop.item", 3, 3
INT64 = np.iinfo(np.int64)
key_lists = st.lists(
    st.one_of(st.integers(-5, 5), st.sampled_from([INT64.min, INT64.max]), st.integers(INT64.min, INT64.max)), max_size=30
)
nodes = st.integers(0, 1)


def sharing(server):
    """The state machine over one server."""

    class Sharing(RuleBasedStateMachine):
        @initialize()
        def start(self):
            with server.client() as client:
                client.flushall()
            self.nodes = [RedisDatabase(server.address, num_partitions=PARTITIONS, max_batch_size=8) for _ in range(2)]
            for node in self.nodes:
                node.open_table(TAG, DIM)
            self.rows = {}
            self.there = True
            self.version = 0

        def teardown(self):
            for node in getattr(self, "nodes", []):
                node.close()

        def fetched(self, node, keys):
            keys = np.array(keys, np.int64)
            out, found = np.full((keys.size, DIM), -1, np.float32), np.zeros(keys.size, np.bool_)
            filled = self.nodes[node].fetch(TAG, keys, out, found)
            assert filled == found.sum()
            assert (out[~found] == -1).all()
            return {int(key): row.tobytes() for key, row, there in zip(keys, out, found, strict=True) if there}

        @precondition(lambda self: self.there)
        @rule(node=nodes, keys=key_lists)
        def insert(self, node, keys):
            self.version = (self.version + 1) % 200
            array = np.array(keys, np.int64)
            vectors = vectors_of(array, DIM, self.version) + np.arange(array.size, dtype=np.float32)[:, None]
            self.nodes[node].insert(TAG, array, vectors)
            self.rows.update({int(key): row.tobytes() for key, row in zip(array, vectors, strict=True)})

        @precondition(lambda self: self.there)
        @rule(node=nodes, keys=key_lists)
        def delete(self, node, keys):
            removed = self.nodes[node].delete(TAG, np.array(keys, np.int64))
            assert removed == len(set(keys) & set(self.rows))
            for key in keys:
                self.rows.pop(key, None)

        @precondition(lambda self: self.there)
        @rule(node=nodes, keys=key_lists)
        def fetch(self, node, keys):
            wanted = [*keys, *list(self.rows)[:10]]
            assert self.fetched(node, wanted) == {key: self.rows[key] for key in wanted if key in self.rows}

        @precondition(lambda self: self.there)
        @rule(node=nodes, chunk=st.integers(1, 50))
        def scan(self, node, chunk):
            pieces = list(self.nodes[node].scan(TAG, chunk))
            scanned = {int(key): row.tobytes() for keys, rows in pieces for key, row in zip(keys, rows, strict=True)}
            assert scanned == self.rows
            assert sum(keys.size for keys, _ in pieces) == len(self.rows) == self.nodes[node].size(TAG)

        @rule(node=nodes)
        def drop(self, node):
            self.nodes[node].drop_table(TAG)
            self.rows = {}
            self.there = False
            for one in (0, 1):
                with pytest.raises(UnknownTableError):
                    self.fetched(one, [1, 2, 3, 4, 5])

        @precondition(lambda self: not self.there)
        @rule(node=nodes)
        def open_again(self, node):
            self.nodes[node].open_table(TAG, DIM)
            with pytest.raises(UnknownTableError):  # the other one had rows
                self.fetched(1 - node, [1, 2, 3, 4, 5])
            self.nodes[1 - node].open_table(TAG, DIM)
            self.there = True

        @precondition(lambda self: self.there)
        @rule()
        def lose_everything(self):
            with server.client() as client:
                client.flushall()
            self.rows = {}
            self.there = False

    return Sharing


@pytest.mark.redis
def test_both_processes_read_what_either_wrote(server):
    short = settings(max_examples=10, stateful_step_count=20, deadline=None, derandomize=True)
    run_state_machine_as_test(sharing(server), settings=short)

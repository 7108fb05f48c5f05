"""Checks that tables fit into the memory of Redis' nodes."""

from collections.abc import Sequence
from typing import Final

from hps.ground.memory.capacity import check_fits
from hps.stores.redis.dialects import evicts_any_key
from hps.stores.redis.layout import RedisLayout
from hps.stores.redis.nodes import RedisNodes
from hps.stores.redis.requests import Call
from hps.types import stored_text

_ENTRY_BYTES: Final = 48  # the entry of a row in the table of its hash, and the string of its key


def partition_bytes(dim: int, rows: int) -> int:
    """Estimate the bytes of a partition's rows in a node's memory, within 1.5 % for Redis 7 (dim 1 to 256).

    Each is an entry, a key and a value; each entry has a pointer in a table of a power of two. jemalloc hands values out in
    sizes of which there are four to a power of two.
    """
    string = 4 * dim + (4 if 4 * dim < 256 else 6 if 4 * dim < 1 << 16 else 10)
    step = max(16, 1 << max((string - 1).bit_length() - 3, 0))
    return rows * (_ENTRY_BYTES + -(-string // step) * step) + (8 << (rows - 1).bit_length() if rows else 0)


def check_room(nodes: RedisNodes, tables: Sequence[tuple[str, int, int]], num_partitions: int, margin: int) -> None:
    """Refuse tables that do not fit; see `Database.check_room`.

    A node that evicts any key is never full and not checked. A node without `maxmemory` has the memory of its machine.

    Args:
        nodes: run the commands.
        tables: tag, dim and rows of each.
        num_partitions: of a table.
        margin: most rows of a partition.
    """
    needs: dict[str, dict[str, int]] = {}
    slots: dict[str, int] = {}
    for tag, dim, rows in tables:
        partitions = RedisLayout.of(tag, dim, num_partitions).partitions
        held = [Call(partition.slot, "HLEN", partition.values) for partition in partitions]
        nodes.run(held)
        missing = max(0, min(rows, margin * num_partitions) - sum(call.reply for call in held))
        for partition in partitions:
            name = nodes.name_of(partition.slot)
            slots[name] = partition.slot
            own, what = needs.setdefault(name, {}), f"{rows:,} rows of table {tag} ({stored_text(tag, dim)})"
            own[what] = own.get(what, 0) + partition_bytes(dim, -(-missing // num_partitions))
    for name, own in needs.items():
        lines = nodes.ask(slots[name], "INFO", "memory").decode().splitlines()
        facts = dict(line.split(":", 1) for line in lines if ":" in line)
        limit = int(facts["maxmemory"])
        if limit and evicts_any_key(facts):
            continue
        check_fits(
            f"redis {name}: making room for tables",
            own,
            (limit or int(facts["total_system_memory"])) - int(facts["used_memory"]),
            "below its maxmemory" if limit else "on its machine",
            "undeploy models or versions, raise maxmemory, add nodes, or lower overflow_margin or initial_cache_rate",
        )

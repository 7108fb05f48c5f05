"""Whether tables fit into the memory of the nodes of one Redis."""

from collections.abc import Sequence
from typing import Final

from hps.capacity import check_fits
from hps.databases.redis.layout import RedisLayout
from hps.databases.redis.nodes import RedisNodes
from hps.databases.redis.requests import Call

_ROW_OVERHEAD_BYTES: Final = 100  # beside the vector; 95 were measured


def check_room(nodes: RedisNodes, tables: Sequence[tuple[str, int, int]], num_partitions: int, margin: int) -> None:
    """Refuse tables that do not fit; see `Database.check_room`.

    A node that evicts keys of any kind is never full, and is not asked. One without `maxmemory` has what its machine has,
    as if nothing else were there.

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
            own, what = needs.setdefault(name, {}), f"{rows:,} rows of table {tag} (dim {dim})"
            own[what] = own.get(what, 0) + -(-missing // num_partitions) * (4 * dim + _ROW_OVERHEAD_BYTES)
    for name, own in needs.items():
        lines = nodes.ask(slots[name], "INFO", "memory").decode().splitlines()
        facts = dict(line.split(":", 1) for line in lines if ":" in line)
        limit = int(facts["maxmemory"])
        if limit and facts["maxmemory_policy"].startswith("allkeys"):
            continue
        check_fits(
            f"redis {name}: making room for tables",
            own,
            (limit or int(facts["total_system_memory"])) - int(facts["used_memory"]),
            "below its maxmemory" if limit else "on its machine",
            "undeploy models or versions, raise maxmemory, add nodes, or lower overflow_margin or initial_cache_rate",
        )

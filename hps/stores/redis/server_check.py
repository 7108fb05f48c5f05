"""Checks of a Redis before a load: its state, the user's rights, the tables that it holds and the room for others.

Nothing is written. Rights are checked by queueing the commands after MULTI: Redis checks a command when it queues it. EXEC
never follows, so none runs.
"""

from collections.abc import Collection, Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any, Final

from redis import Redis, exceptions
from redis.crc import REDIS_CLUSTER_HASH_SLOTS

from hps.errors import ConfigError, DatabaseError
from hps.ground.memory.capacity import check_fits
from hps.stores.redis.catalog import Catalog
from hps.stores.redis.layout import RedisLayout
from hps.stores.redis.nodes import RedisNodes, access_of, evicts_any_key, is_replica, program_of
from hps.stores.redis.requests import Call
from hps.stores.redis.users import is_used
from hps.types import ROW_DTYPES, CheckResult, TableSpec, stored_text

_ENTRY_BYTES: Final = 48  # the entry of a row in the table of its hash, and the string of its key
_WHERE: Final = "volatile_db"
_TIMEOUT_S: Final = 5.0
# Phrases of errors that last until the configuration or the server is changed.
_REFUSALS: Final = ("password", "user_name", "certificate", "TLS failed", "may not do this", "drop the table")


def check_server(config: Any, tables: Collection[TableSpec]) -> list[CheckResult]:
    """Check the Redis of a `VolatileDbConfig`; see `LastingDatabase.probe`."""
    try:
        access = access_of(config)
        access["connect_timeout_s"] = access["read_timeout_s"] = access["timeout_s"] = _TIMEOUT_S
        access["num_node_connections"] = 1
        nodes = RedisNodes(config.address, **access)
    except ConfigError as error:
        return [CheckResult("wrong", f"{_WHERE}.{problem.partition(':')[0]}", problem) for problem in error.problems]
    except DatabaseError as error:
        return [CheckResult(_level(error), f"{_WHERE}.address", str(error))]
    with closing(nodes):
        found = [_state(nodes, config.address)]
        catalog = Catalog(nodes, config.num_partitions)
        layouts = [RedisLayout.of(spec.tag, spec.width, config.num_partitions) for spec in tables]
        try:
            for layout in layouts[:1]:
                found += _rights(nodes, layout, config.user_name)
            if all(result.level == "good" for result in found):
                for layout in layouts:
                    catalog.check(layout)
                found += _foreign_formats(nodes, catalog, tables, config.num_partitions)
        except (DatabaseError, exceptions.RedisError) as error:
            found.append(CheckResult(_level(error), f"{_WHERE}.address", str(error)))
    return found


def _foreign_formats(
    nodes: RedisNodes, catalog: Catalog, tables: Iterable[TableSpec], num_partitions: int
) -> list[CheckResult]:
    found, tags = [], catalog.tags()
    for spec in tables:
        for row_dtype in ROW_DTYPES:
            foreign = replace(spec, row_dtype=row_dtype)
            if row_dtype == spec.row_dtype or foreign.tag not in tags:
                continue
            if is_used(nodes, RedisLayout.of(foreign.tag, 1, num_partitions)):
                warning = (
                    f"another replica serves table {spec.table_name!r} of model {spec.model_name!r} as {row_dtype} "
                    f"({foreign.tag}), and this one would as {spec.row_dtype} ({spec.tag}): each has a separate table, "
                    "which takes memory twice; without a persistent_db the deployment is refused. Give all the same row_dtype"
                )
                found.append(CheckResult("warning", f"{_WHERE}.address", warning))
    return found


def _level(error: Exception) -> Any:
    return "wrong" if any(word in str(error) for word in _REFUSALS) else "unreachable"


def _state(nodes: RedisNodes, address: str) -> CheckResult:
    facts = nodes.facts
    server = f"{program_of(facts)} at {address}"
    if nodes.clustered:
        missing = REDIS_CLUSTER_HASH_SLOTS - nodes.served_slots
        if missing:
            return CheckResult("unreachable", f"{_WHERE}.address", f"{server}: {missing} slots have no node; see CLUSTER INFO")
        return CheckResult("good", f"{_WHERE}.address", f"{server}: a complete cluster")
    if is_replica(facts):
        return CheckResult("wrong", f"{_WHERE}.address", f"{server} is a replica; give the address of the primary")
    return CheckResult("good", f"{_WHERE}.address", f"{server}: a server")


def _rights(nodes: RedisNodes, layout: RedisLayout, user: str) -> list[CheckResult]:
    """Check the commands of lookups, loads and updates at the node of the table's first partition."""
    partition = layout.partitions[0]
    values, mark = partition.values, partition.mark
    commands: list[tuple[Any, ...]] = [("GET", mark), ("HMGET", values, "f"), ("HGET", values, "f"), ("HGETALL", values)]
    commands += [("HLEN", values), ("HSCAN", values, 0), ("HRANDFIELD", values), ("SCAN", 0), ("TIME",)]
    commands += [("MEMORY", "USAGE", values), ("SET", mark, "v"), ("HSET", values, "f", "v"), ("HSETNX", values, "f", "v")]
    commands += [("HDEL", values, "f"), ("HINCRBY", values, "f", 1), ("DEL", mark), ("UNLINK", values), ("PEXPIRE", mark, 1)]
    commands += [("EVAL", "return 1", 1, values)]
    try:
        answers = _queued(nodes.client(partition.slot), commands)
    except exceptions.NoPermissionError:
        return [CheckResult("wrong", f"{_WHERE}.user_name", f"the user {user} may not MULTI; grant +multi +exec +watch")]
    denied = [name for name, error in answers.items() if isinstance(error, exceptions.NoPermissionError)]
    refused = {str(error): name for name, error in answers.items() if error and name not in denied}
    found = [CheckResult("wrong", f"{_WHERE}.address", f"{word} is refused: {text}") for text, word in refused.items()]
    if denied:
        grants = " ".join("+" + name.lower().replace(" ", "|") for name in denied)
        text = f"the user {user} may not {', '.join(denied)} keys of {layout.tag}; grant ~hps_et{{* {grants}"
        found.append(CheckResult("wrong", f"{_WHERE}.user_name", text))
    elif not refused:
        found.append(CheckResult("good", f"{_WHERE}.user_name", f"the user {user or 'default'} may read and write hps_et{{*"))
    return found


def _queued(client: Redis, commands: Sequence[tuple[Any, ...]]) -> dict[str, exceptions.ResponseError | None]:
    connection = client.connection_pool.get_connection()
    answers: dict[str, exceptions.ResponseError | None] = {}
    try:
        connection.send_command("MULTI")
        connection.read_response()  # raises if it is refused: otherwise the commands would run
        for words in commands:
            name = " ".join(words[:2]) if words[0] == "MEMORY" else str(words[0])
            connection.send_command(*words)
            try:
                answers[name] = None if connection.read_response() == b"QUEUED" else exceptions.ResponseError("not queued")
            except exceptions.ResponseError as error:
                answers[name] = error
        return answers
    finally:
        connection.disconnect()  # as DISCARD does
        client.connection_pool.release(connection)


def partition_bytes(dim: int, rows: int) -> int:
    """Estimate the bytes of a partition's rows in a node's memory, within 1.5 % for Redis 7 (dim 1 to 256)."""
    # A row is an entry, a key and a value; each entry has a pointer in a table of a power of two. jemalloc allocates values in
    # size classes, of which there are four to a power of two.
    string = 4 * dim + (4 if 4 * dim < 256 else 6 if 4 * dim < 1 << 16 else 10)
    step = max(16, 1 << max((string - 1).bit_length() - 3, 0))
    return rows * (_ENTRY_BYTES + -(-string // step) * step) + (8 << (rows - 1).bit_length() if rows else 0)


def check_room(nodes: RedisNodes, tables: Sequence[tuple[str, int, int]], num_partitions: int, margin: int) -> None:
    """Refuse tables that do not fit; see `Database.check_room`.

    A node that evicts any key is never full and not checked. A node without `maxmemory` has the memory of its machine.
    """
    needs: dict[str, dict[str, int]] = {}
    slots: dict[str, int] = {}
    for tag, dim, rows in tables:
        partitions = RedisLayout.of(tag, dim, num_partitions).partitions
        present = [Call(partition.slot, "HLEN", partition.values) for partition in partitions]
        nodes.run(present)
        missing = max(0, min(rows, margin * num_partitions) - sum(call.reply for call in present))
        for partition in partitions:
            name = nodes.name_of(partition.slot)
            slots[name] = partition.slot
            of_node, table = needs.setdefault(name, {}), f"{rows:,} rows of table {tag} ({stored_text(tag, dim)})"
            of_node[table] = of_node.get(table, 0) + partition_bytes(dim, -(-missing // num_partitions))
    for name, of_node in needs.items():
        lines = nodes.execute(slots[name], "INFO", "memory").decode().splitlines()
        facts = dict(line.split(":", 1) for line in lines if ":" in line)
        limit = int(facts["maxmemory"])
        if limit and evicts_any_key(facts):
            continue
        check_fits(
            f"redis {name}: making room for tables",
            of_node,
            (limit or int(facts["total_system_memory"])) - int(facts["used_memory"]),
            "below its maxmemory" if limit else "on its machine",
            "undeploy models or versions, raise maxmemory, add nodes, or lower overflow_margin or initial_cache_rate",
        )

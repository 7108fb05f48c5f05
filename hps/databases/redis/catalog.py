"""Which tables there are in Redis: made, found, measured before they are used, and dropped."""

import logging
from collections.abc import Iterable
from typing import Any

from hps.databases.redis.commands import Ask, request
from hps.databases.redis.dispatch import Dispatcher
from hps.databases.redis.layout import ANY_KEY, LOADED, Layout, new_mark, partition_number, tag_of
from hps.databases.redis.loaded import parse_loaded
from hps.errors import DatabaseError, TableWidthError

_log = logging.getLogger(__name__)
_SCAN_COUNT = b"10000"


class Catalog:
    """The tables of one Redis. *Thread-safe.*

    Args:
        dispatcher: runs the commands.
        num_partitions: of tables that are made here.
    """

    def __init__(self, dispatcher: Dispatcher, num_partitions: int) -> None:
        self._dispatcher = dispatcher
        self._num_partitions = num_partitions

    def open(self, tag: str, dim: int) -> tuple[Layout, list[bytes]]:
        """Make a table where there is none; returns its layout and the marks of its partitions.

        Raises:
            TableWidthError: it holds vectors of another width.
            DatabaseError: it has another number of partitions, or Redis failed.
        """
        layout = Layout.of(tag, dim, self._num_partitions)
        if not self._about(layout):
            self._check_foreign(layout)
        wanted = {b"dim": b"%d" % dim, b"num_partitions": b"%d" % self._num_partitions}
        commands = [Ask(layout.slot, request(b"HSETNX", layout.about, name, value)) for name, value in wanted.items()]
        commands.append(Ask(layout.slot, request(b"HGETALL", layout.about)))
        self._dispatcher.run(commands)
        self._check_about(layout, _pairs(commands[-1].reply))
        return layout, self._mark(layout)

    def marks(self, layout: Layout, deadline: float, *, whole: bool) -> list[bytes] | None:
        """The marks that the partitions have now; None when one has none, or the table has another shape.

        Args:
            layout: the table as it was opened.
            deadline: when the answer must be there, on the monotonic clock.
            whole: None, too, while a model is being loaded into it.

        Raises:
            DatabaseError: Redis failed.
        """
        about = Ask(layout.slot, request(b"HMGET", layout.about, b"dim", b"num_partitions", LOADED))
        marks = [Ask(partition.slot, partition.get_mark) for partition in layout.partitions]
        self._dispatcher.run([about, *marks], deadline)
        dim, partitions, loaded = about.reply
        if (dim, partitions) != (b"%d" % layout.dim, b"%d" % len(layout.partitions)):
            return None
        if whole and loaded is not None and not parse_loaded(loaded, layout).complete:
            return None
        found = [mark.reply for mark in marks]
        return found if all(found) else None

    def tags(self) -> list[str]:
        """Tags of all tables, sorted."""
        return sorted({tag for key in self._keys(ANY_KEY) if (tag := tag_of(key)) is not None})

    def drop(self, tag: str) -> None:
        """Remove every key of a table, but for the lease of who is about to load it.

        The marks go first, so that nobody takes vectors that go after them for absent; what the table is goes last.
        """
        layout = Layout.of(tag, 1, self._num_partitions)
        about = self._about(layout)
        if about:
            partitions = max(self._num_partitions, int(about.get(b"num_partitions", b"0")))
        else:
            numbers = (partition_number(key) for key in self._keys(b"hps_et{%b/p*}?" % tag.encode()))
            partitions = max(numbers, default=-1) + 1
        layout = Layout.of(tag, 1, partitions)
        for kind in ("mark", "uses", "values"):
            # One key a command, and a kind at a time: the keys of a slot that is on its way may be on two nodes.
            self._dispatcher.run([Ask(part.slot, request(b"UNLINK", getattr(part, kind))) for part in layout.partitions])
        self._dispatcher.run([Ask(layout.slot, request(b"UNLINK", layout.about))])

    def _about(self, layout: Layout) -> dict[bytes, bytes]:
        command = Ask(layout.slot, request(b"HGETALL", layout.about))
        self._dispatcher.run([command])
        return _pairs(command.reply)

    def _mark(self, layout: Layout) -> list[bytes]:
        marks = []
        commands: list[Ask] = []
        for partition in layout.partitions:
            commands.append(Ask(partition.slot, request(b"SET", partition.mark, new_mark(), b"NX")))
            marks.append(Ask(partition.slot, partition.get_mark))
            commands.append(marks[-1])
        self._dispatcher.run(commands)
        return [mark.reply or b"" for mark in marks]

    def _check_about(self, layout: Layout, about: dict[bytes, bytes]) -> None:
        dim, partitions = int(about.get(b"dim", b"0")), int(about.get(b"num_partitions", b"0"))
        if dim != layout.dim:
            raise TableWidthError(
                f"redis: opening table {layout.tag}: got vectors of {layout.dim} elements, wanted {dim}, which it holds; "
                "drop the table first, or give it another name"
            )
        self._check_partitions(layout, partitions)

    def _check_partitions(self, layout: Layout, partitions: int) -> None:
        if partitions != len(layout.partitions):
            raise DatabaseError(
                f"redis: opening table {layout.tag}: got num_partitions {len(layout.partitions)}, wanted {partitions}, with "
                f"which it was written; set num_partitions to {partitions}, or drop the table"
            )

    def _check_foreign(self, layout: Layout) -> None:
        """Look at vectors that somebody else, such as HugeCTR, wrote: a partition count or a width that differs is refused."""
        keys = [key for key in self._keys(b"hps_et{%b/p*}v" % layout.tag.encode()) if tag_of(key) == layout.tag]
        if not keys:
            return
        _log.info("Table: %s; %d partitions of it are in Redis and are used as they are.", layout.tag, len(keys))
        highest = max(map(partition_number, keys)) + 1
        if highest > len(layout.partitions):
            self._check_partitions(layout, highest)
        commands = [
            Ask(partition.slot, request(b"HSCAN", partition.values, b"0", b"COUNT", b"1")) for partition in layout.partitions
        ]
        self._dispatcher.run(commands)
        for command in commands:
            row = command.reply[1][:2]
            if row and len(row[1]) != 4 * layout.dim:
                raise TableWidthError(
                    f"redis: opening table {layout.tag}: got vectors of {layout.dim} elements ({4 * layout.dim} bytes), "
                    f"wanted ones of {len(row[1])} bytes, which it holds; drop the table first, or mend the width"
                )

    def _keys(self, pattern: bytes) -> Iterable[bytes]:
        """Yield the keys of all nodes that match, some perhaps twice."""
        cursors = dict.fromkeys(self._dispatcher.topology().nodes, b"0")
        while cursors:
            commands = {
                node: Ask(0, request(b"SCAN", cursor, b"MATCH", pattern, b"COUNT", _SCAN_COUNT))
                for node, cursor in cursors.items()
            }
            self._dispatcher.run_on_each_node(commands)
            for node, command in commands.items():
                cursors[node], keys = command.reply
                yield from keys
            cursors = {node: cursor for node, cursor in cursors.items() if cursor != b"0"}


def _pairs(flat: Any) -> dict[bytes, bytes]:
    return dict(zip(flat[::2], flat[1::2], strict=True))

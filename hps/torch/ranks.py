"""Brings the rows of sharded tables to rank 0, which writes them, while the other ranks answer its requests.

A table is one file of rows with one checksum, and most file systems write files from beginning to end: so one rank writes. It
asks the others for a chunk at a time, over a gloo group of their own. A rank that dies is noticed when its connection closes,
and one that fails says so; then all ranks raise an error.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch

from hps.errors import HPSError, InvalidInputError, ModelFileError
from hps.torch.tables import Piece, Rows, ShardedTable, Table

Result = TypeVar("Result")

_TIMEOUT = timedelta(minutes=30)  # that of torch's own gloo groups; a machine that vanished closes no connection
_AWAKE_S = 60.0  # a rank that holds nothing of a large table hears this often from rank 0

_Box = tuple[int, int, int, int]  # first row, first column, rows, columns


class RankJob:
    """What the ranks of a job do together to write tables. *One thread on each rank.*

    Every rank of the default group makes one (`gather`) and asks `leads`. The rank that leads reads from `tables` and ends with
    `finish`; the others call `follow`. A process without sharded tables, and so without a `group`, leads alone.

    Attributes:
        tables: readable tables by name; on the rank that leads.
    """

    def __init__(self, doing: str, tables: Mapping[str, Table | ShardedTable], group: Any = None) -> None:
        self.doing = doing
        self.tables: Mapping[str, Table] = {name: table for name, table in tables.items() if isinstance(table, Table)}
        self._group = group
        self._rank, self._others = 0, list[int]()
        self._ended = False
        self._heard = time.monotonic()
        if group is not None:
            self._share(tables)

    def _share(self, tables: Mapping[str, Table | ShardedTable]) -> None:
        self._rank = torch.distributed.get_rank()
        self._others = [rank for rank in range(torch.distributed.get_world_size()) if rank]
        self._held = {name: [piece.rows for piece in _held(table)] for name, table in tables.items()}
        boxes = {
            name: [(piece.row, piece.column, *piece.rows.shape) for piece in _held(table)] for name, table in tables.items()
        }
        said: list[Any] = [None] * (len(self._others) + 1)
        try:
            torch.distributed.all_gather_object(said, boxes, group=self._group)
        except RuntimeError as error:
            raise ModelFileError(f"{self.doing}: a rank does not answer: {error}") from error
        if any(list(one) != list(tables) for one in said):
            names = ", ".join(tables)
            raise InvalidInputError(f"{self.doing}: got other tables on other ranks, expected {names} on all of them")
        self.tables = {
            name: _GatheredTable(
                self, name, table.shape, _owners(f"{self.doing}, table {name!r}", table.shape, [one[name] for one in said])
            )
            for name, table in tables.items()
        }

    def leads(self) -> bool:
        """Return whether this rank writes; it then waits until the others are ready.

        Raises:
            ModelFileError: another rank failed, or does not answer.
        """
        if self._rank:
            return False
        for rank in self._others:
            self._ask(rank, ("ready",))
        return True

    def finish(self, result: Result) -> Result:
        """Give the others the result, which `follow` returns there."""
        self._ended = True
        for rank in self._others:
            self._send(rank, ("done", result))
        return result

    def follow(self) -> Any:
        """Answer the requests of the rank that leads until it has ended, and return its result.

        Raises:
            ModelFileError: it failed, or does not answer; InvalidInputError: if that is what it raised.
        """
        return self._answer(None)

    def give_up(self, error: BaseException) -> None:
        """Tell the others of an error of this rank."""
        if self._ended:
            return
        text = self._text(error)
        if self._rank:
            with suppress(HPSError):
                self._answer(text)
            return
        self._ended = True
        for rank in self._others:
            with suppress(HPSError):
                self._send(rank, ("failed", isinstance(error, InvalidInputError), text))

    def read(self, rank: int, name: str, number: int, rows: Rows, shape: tuple[int, int]) -> torch.Tensor:
        """Return rows of a piece that a rank holds, as `Table.read`; `shape` is that of the result."""
        if rank == self._rank:
            return self._held[name][number].read(rows)
        self._ask(rank, ("read", name, number, rows))
        block = torch.empty(shape)
        with self._checked(rank):
            torch.distributed.recv(block, rank, group=self._group)
        return block

    def keep_awake(self) -> None:
        """Let ranks that are not asked know that this one goes on."""
        if time.monotonic() - self._heard > _AWAKE_S:
            self._heard = time.monotonic()
            for rank in self._others:
                self._send(rank, ("wait",))

    def _ask(self, rank: int, request: tuple[Any, ...]) -> None:
        self._send(rank, request)
        if (failure := self._take(rank)) is not None:
            raise ModelFileError(f"{self.doing}: {failure}")

    def _answer(self, failure: str | None) -> Any:
        while True:
            verb, *given = self._take(0)
            if verb in ("done", "failed"):
                self._ended = True
                return given[0] if verb == "done" else self._raise(*given)
            if verb == "wait":
                continue
            block = None
            if verb == "read" and failure is None:
                name, number, rows = given
                try:
                    block = self._held[name][number].read(rows).contiguous()
                except Exception as error:  # noqa: BLE001 - rank 0 raises it, and then this rank does, too
                    failure = self._text(error)
            self._send(0, failure)
            if block is not None:
                with self._checked(0):
                    torch.distributed.send(block, 0, group=self._group)

    def _raise(self, is_of_input: bool, text: str) -> NoReturn:
        raise (InvalidInputError if is_of_input else ModelFileError)(f"{self.doing}: {text}")

    def _text(self, error: BaseException) -> str:
        return _text(self.doing, self._rank, error)

    def _send(self, rank: int, message: Any) -> None:
        with self._checked(rank):
            torch.distributed.send_object_list([message], rank, group=self._group)

    def _take(self, rank: int) -> Any:
        message = [None]
        with self._checked(rank):
            torch.distributed.recv_object_list(message, rank, group=self._group)
        return message[0]

    @contextmanager
    def _checked(self, rank: int) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # all that torch.distributed raises
            if isinstance(error, HPSError):
                raise
            cause = str(error).partition(". ")[0]
            raise ModelFileError(f"{self.doing}: rank {rank} does not answer: {cause}; look for its own error") from error


@contextmanager
def gather(doing: str, tables: Mapping[str, Table | ShardedTable]) -> Iterator[RankJob]:
    """Make tables readable; if some are sharded, on all ranks together, until the block ends.

    Args:
        doing: begins the text of errors.
        tables: by name; every rank has the same names, shards of the same tables, and unsharded tables in full.

    Raises:
        InvalidInputError: the shards do not cover a table.
        ModelFileError: a rank does not answer.
    """
    if all(isinstance(table, Table) for table in tables.values()):
        yield RankJob(doing, tables)
        return
    if not torch.distributed.is_initialized():
        raise InvalidInputError(f"{doing}: got sharded tables without a process group, expected init_process_group before")
    with _connected(doing) as group:
        job = RankJob(doing, tables, group)
        try:
            yield job
        except BaseException as error:
            job.give_up(error)
            raise


@contextmanager
def agreed(doing: str, is_sharded: bool) -> Iterator[None]:
    """Fail on all ranks of a job if the block fails on one: else the others would wait for it in the next collective.

    Raises:
        InvalidInputError, ModelFileError: another rank failed, or does not answer.
    """
    if not is_sharded or not torch.distributed.is_initialized():
        yield
        return
    own: Exception | None = None
    try:
        yield
    except Exception as error:  # noqa: BLE001 - raised below, when the others know
        own = error
    rank = torch.distributed.get_rank()
    said: list[tuple[bool, str] | None] = [None] * torch.distributed.get_world_size()
    told = None if own is None else (isinstance(own, InvalidInputError), _text(doing, rank, own))
    with _connected(doing) as group:
        try:
            torch.distributed.all_gather_object(said, told, group=group)
        except RuntimeError as error:
            raise own or ModelFileError(f"{doing}: a rank does not answer: {error}") from error
    if own is not None:
        raise own
    for is_of_input, text in filter(None, said):
        raise (InvalidInputError if is_of_input else ModelFileError)(f"{doing}: {text}")


@contextmanager
def _connected(doing: str) -> Iterator[Any]:
    """Make a group of all ranks for the block."""
    try:
        group = torch.distributed.new_group(backend="gloo", timeout=_TIMEOUT)
    except RuntimeError as error:
        raise ModelFileError(f"{doing}: the ranks cannot connect: {error}") from error
    try:
        yield group
    finally:
        torch.distributed.destroy_process_group(group)


def _text(doing: str, rank: int, error: BaseException) -> str:
    kind = "" if isinstance(error, HPSError) else f"{type(error).__name__}: "
    return f"rank {rank} failed: {kind}{str(error).removeprefix(f'{doing}: ')}"


class _GatheredTable(Table):
    """A table that several ranks hold; read by the one that leads. *One thread.*"""

    def __init__(self, job: RankJob, name: str, shape: tuple[int, int], owners: Mapping[_Box, tuple[int, int]]) -> None:
        self.shape = shape
        self._job = job
        self._name = name
        self._owners = owners

    def read(self, rows: Rows) -> torch.Tensor:
        self._job.keep_awake()
        numbers = torch.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
        if len(numbers) and not 0 <= int(numbers.min()) <= int(numbers.max()) < self.shape[0]:
            raise IndexError(f"got rows {int(numbers.min())} to {int(numbers.max())}, expected 0 to {self.shape[0] - 1}")
        out = torch.empty(len(numbers), self.shape[1])
        for (row, column, height, width), (rank, number) in self._owners.items():
            wanted: Rows
            if isinstance(rows, slice):
                first = max(rows.start, row)
                last = max(first, min(rows.stop, row + height))
                at, wanted = torch.arange(first - rows.start, last - rows.start), slice(first - row, last - row)
            else:
                at = torch.nonzero((rows >= row) & (rows < row + height)).flatten()
                wanted = rows[at] - row
            if len(at):
                block = self._job.read(rank, self._name, number, wanted, (len(at), width))
                out[at, column : column + width] = block
        return out


def _held(table: Table | ShardedTable) -> list[Piece]:
    return [Piece(0, 0, table)] if isinstance(table, Table) else list(table.pieces)


def _owners(doing: str, shape: tuple[int, int], said: Sequence[Sequence[_Box]]) -> dict[_Box, tuple[int, int]]:
    """Choose a rank, and the number of the piece there, for each piece of a table; the first rank of those that hold it.

    Raises:
        InvalidInputError: the pieces do not cover every element once.
    """
    owners: dict[_Box, tuple[int, int]] = {}
    for rank, boxes in enumerate(said):
        for number, box in enumerate(boxes):
            owners.setdefault(box, (rank, number))
    edges = [
        sorted({0, shape[axis], *(edge for box in owners for edge in (box[axis], box[axis] + box[axis + 2]))})
        for axis in (0, 1)
    ]
    times = np.zeros((len(edges[0]) - 1, len(edges[1]) - 1), np.int64)
    for row, column, height, width in owners:
        (top, bottom), (left, right) = (
            np.searchsorted(edges[axis], (start, start + size)) for axis, start, size in ((0, row, height), (1, column, width))
        )
        times[top:bottom, left:right] += 1
    if edges[0][-1] != shape[0] or edges[1][-1] != shape[1] or (times != 1).any():
        raise InvalidInputError(
            f"{doing}: got shards (row, column, rows, columns) {sorted(owners)[:8]}, expected that they "
            f"cover {shape[0]} rows of {shape[1]} elements once"
        )
    return owners

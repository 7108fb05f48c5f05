"""Sends the rows of sharded tables to rank 0, which writes them.

A table is one file of rows with one checksum, and most file systems write files from beginning to end, so one rank writes. It
requests chunks from the others over their own gloo group. All ranks raise an error if a rank reports a failure, or if its
connection closes.
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

_TIMEOUT = timedelta(minutes=30)  # as torch's own gloo groups: a machine that vanished closes no connection
_KEEP_ALIVE_S = 60.0  # interval of messages to ranks without requests, such as those without rows of a large table

_Box = tuple[int, int, int, int]  # first row, first column, rows, columns


class RankJob:
    """The part of one rank in writing tables together. *One thread on each rank.*

    Every rank of the default group makes one (`gather`) and calls `leads`. The leading rank reads from `tables` and calls
    `finish` at the end; the others call `follow`. A process without sharded tables has no `group`, and leads.

    Attributes:
        tables: readable tables by name, on the leading rank.
    """

    def __init__(self, doing: str, tables: Mapping[str, Table | ShardedTable], group: Any = None) -> None:
        self.doing = doing
        self.tables: Mapping[str, Table] = {name: table for name, table in tables.items() if isinstance(table, Table)}
        self._group = group
        self._rank, self._other_ranks = 0, list[int]()
        self._ended = False
        self._last_sent = time.monotonic()
        if group is not None:
            self._share(tables)

    def _share(self, tables: Mapping[str, Table | ShardedTable]) -> None:
        self._rank = torch.distributed.get_rank()
        self._other_ranks = [rank for rank in range(torch.distributed.get_world_size()) if rank]
        self._own_pieces = {name: [piece.rows for piece in _pieces_of(table)] for name, table in tables.items()}
        boxes = {
            name: [(piece.row, piece.column, *piece.rows.shape) for piece in _pieces_of(table)]
            for name, table in tables.items()
        }
        gathered: list[Any] = [None] * (len(self._other_ranks) + 1)
        try:
            torch.distributed.all_gather_object(gathered, boxes, group=self._group)
        except RuntimeError as error:
            raise ModelFileError(f"{self.doing}: a rank does not answer: {error}") from error
        if any(list(boxes_of_rank) != list(tables) for boxes_of_rank in gathered):
            names = ", ".join(tables)
            raise InvalidInputError(f"{self.doing}: got other tables on other ranks, expected {names} on all of them")
        self.tables = {
            name: _GatheredTable(
                self,
                name,
                table.shape,
                _sources_of(f"{self.doing}, table {name!r}", table.shape, [boxes_of_rank[name] for boxes_of_rank in gathered]),
            )
            for name, table in tables.items()
        }

    def leads(self) -> bool:
        """Return whether this rank writes; if so, wait until the others are ready.

        Raises:
            ModelFileError: another rank failed, or does not answer.
        """
        if self._rank:
            return False
        for rank in self._other_ranks:
            self._request(rank, ("ready",))
        return True

    def finish(self, result: Result) -> Result:
        """Send the result to the other ranks, where `follow` returns it."""
        self._ended = True
        for rank in self._other_ranks:
            self._send(rank, ("done", result))
        return result

    def follow(self) -> Any:
        """Answer the requests of the leading rank until it has finished, and return its result.

        Raises:
            ModelFileError, InvalidInputError: the leading rank raised it, or does not answer.
        """
        return self._answer(None)

    def report_failure(self, error: BaseException) -> None:
        """Report an error of this rank to the others."""
        if self._ended:
            return
        text = self._text(error)
        if self._rank:
            with suppress(HPSError):
                self._answer(text)
            return
        self._ended = True
        for rank in self._other_ranks:
            with suppress(HPSError):
                self._send(rank, ("failed", isinstance(error, InvalidInputError), text))

    def read(self, rank: int, name: str, number: int, rows: Rows, shape: tuple[int, int]) -> torch.Tensor:
        """Return rows of a piece of a rank, as `Table.read`; `shape` is that of the result."""
        if rank == self._rank:
            return self._own_pieces[name][number].read(rows)
        self._request(rank, ("read", name, number, rows))
        block = torch.empty(shape)
        with self._checked(rank):
            torch.distributed.recv(block, rank, group=self._group)
        return block

    def send_keep_alive(self) -> None:
        """Send a message to the other ranks from time to time, so that they do not time out."""
        if time.monotonic() - self._last_sent > _KEEP_ALIVE_S:
            self._last_sent = time.monotonic()
            for rank in self._other_ranks:
                self._send(rank, ("wait",))

    def _request(self, rank: int, request: tuple[Any, ...]) -> None:
        self._send(rank, request)
        if (failure := self._receive(rank)) is not None:
            raise ModelFileError(f"{self.doing}: {failure}")

    def _answer(self, failure: str | None) -> Any:
        while True:
            verb, *arguments = self._receive(0)
            if verb in ("done", "failed"):
                self._ended = True
                return arguments[0] if verb == "done" else self._raise(*arguments)
            if verb == "wait":
                continue
            block = None
            if verb == "read" and failure is None:
                name, number, rows = arguments
                try:
                    block = self._own_pieces[name][number].read(rows).contiguous()
                except Exception as error:  # noqa: BLE001 - raised by rank 0, and then by this rank
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

    def _receive(self, rank: int) -> Any:
        message = [None]
        with self._checked(rank):
            torch.distributed.recv_object_list(message, rank, group=self._group)
        return message[0]

    @contextmanager
    def _checked(self, rank: int) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # the only class that torch.distributed raises
            if isinstance(error, HPSError):
                raise
            cause = str(error).partition(". ")[0]
            raise ModelFileError(f"{self.doing}: rank {rank} does not answer: {cause}; look for its own error") from error


@contextmanager
def gather(doing: str, tables: Mapping[str, Table | ShardedTable]) -> Iterator[RankJob]:
    """Make tables readable until the block ends; on all ranks together if a table is sharded.

    Args:
        doing: beginning of error messages.
        tables: by name; every rank has the same names, its shards of sharded tables, and all rows of others.

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
            job.report_failure(error)
            raise


@contextmanager
def fail_together(doing: str, is_sharded: bool) -> Iterator[None]:
    """Fail on all ranks if the block fails on one: else the others would wait for it in the next collective.

    Raises:
        InvalidInputError, ModelFileError: another rank failed, or does not answer.
    """
    if not is_sharded or not torch.distributed.is_initialized():
        yield
        return
    own_error: Exception | None = None
    try:
        yield
    except Exception as error:  # noqa: BLE001 - raised below, after the others were informed
        own_error = error
    rank = torch.distributed.get_rank()
    failures: list[tuple[bool, str] | None] = [None] * torch.distributed.get_world_size()
    failure = None if own_error is None else (isinstance(own_error, InvalidInputError), _text(doing, rank, own_error))
    with _connected(doing) as group:
        try:
            torch.distributed.all_gather_object(failures, failure, group=group)
        except RuntimeError as error:
            raise own_error or ModelFileError(f"{doing}: a rank does not answer: {error}") from error
    if own_error is not None:
        raise own_error
    for is_of_input, text in filter(None, failures):
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
    """A sharded table, read by the leading rank. *One thread.*"""

    def __init__(self, job: RankJob, name: str, shape: tuple[int, int], sources: Mapping[_Box, tuple[int, int]]) -> None:
        self.shape = shape
        self._job = job
        self._name = name
        self._sources = sources

    def read(self, rows: Rows) -> torch.Tensor:
        self._job.send_keep_alive()
        numbers = torch.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
        if len(numbers) and not 0 <= int(numbers.min()) <= int(numbers.max()) < self.shape[0]:
            raise IndexError(f"got rows {int(numbers.min())} to {int(numbers.max())}, expected 0 to {self.shape[0] - 1}")
        out = torch.empty(len(numbers), self.shape[1])
        for (row, column, height, width), (rank, number) in self._sources.items():
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


def _pieces_of(table: Table | ShardedTable) -> list[Piece]:
    return [Piece(0, 0, table)] if isinstance(table, Table) else list(table.pieces)


def _sources_of(doing: str, shape: tuple[int, int], gathered: Sequence[Sequence[_Box]]) -> dict[_Box, tuple[int, int]]:
    """Choose the first rank that has each piece of a table, and the number of the piece there.

    Raises:
        InvalidInputError: the pieces do not cover every element once.
    """
    sources: dict[_Box, tuple[int, int]] = {}
    for rank, boxes in enumerate(gathered):
        for number, box in enumerate(boxes):
            sources.setdefault(box, (rank, number))
    edges = [
        sorted({0, shape[axis], *(edge for box in sources for edge in (box[axis], box[axis] + box[axis + 2]))})
        for axis in (0, 1)
    ]
    coverage = np.zeros((len(edges[0]) - 1, len(edges[1]) - 1), np.int64)
    for row, column, height, width in sources:
        (top, bottom), (left, right) = (
            np.searchsorted(edges[axis], (start, start + size)) for axis, start, size in ((0, row, height), (1, column, width))
        )
        coverage[top:bottom, left:right] += 1
    if edges[0][-1] != shape[0] or edges[1][-1] != shape[1] or (coverage != 1).any():
        raise InvalidInputError(
            f"{doing}: got shards (row, column, rows, columns) {sorted(sources)[:8]}, expected that they "
            f"cover {shape[0]} rows of {shape[1]} elements once"
        )
    return sources

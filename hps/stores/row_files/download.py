"""Copies a row file from elsewhere in the background, while lookups read it in place.

The local file has its final size from the start, with holes; that of a share keeps those outside of the share. Blocks of 64 KB
arrive by ranges: those that a lookup needs, at once and together; all others in the background, the index first. A block is
compared with the checksums of its pages before it is written, and counts as there after that. So nobody reads a hole: a block
that cannot be had is an error of its readers.

Two files beside it survive the process: `<name>.partial`, and `<name>.extents`, which says which blocks are durable. The next
download of the same content goes on from there. The complete file is renamed to `<name>.rows`.
"""

import json
import logging
import os
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from hps.errors import (
    DatabaseCorruptError,
    DatabaseError,
    DatabaseTimeoutError,
    HPSError,
    ModelFileChangedError,
    ModelFileError,
)
from hps.ground.shares import TableShare
from hps.ground.threads.workers import new_thread
from hps.stores.base import RowFileSource
from hps.stores.row_files import layout
from hps.stores.row_files.layout import PAGE_BYTES, FileHead
from hps.stores.row_files.presence import Presence
from hps.stores.row_files.row_file import RowFile
from hps.stores.row_files.writer import sync_directory
from hps.types import IndexArray

_log = logging.getLogger(__name__)

PARTIAL_SUFFIX: Final = ".partial"
EXTENTS_SUFFIX: Final = ".extents"

BLOCK_BYTES: Final = 64 << 10
_BLOCK_PAGES: Final = BLOCK_BYTES // PAGE_BYTES
_GAP_BLOCKS: Final = 1  # blocks read in vain rather than by another request
_TRIES: Final = 2  # of a range whose pages contradict their checksums: the transfer may have damaged it
_WAIT_S: Final = 60.0  # for blocks that a lookup needs
_PAUSE_S: Final = 1.0  # between attempts of the background, doubled up to the longest
_LONGEST_PAUSE_S: Final = 30.0
_RECORDED_S: Final = 5.0  # between records of what is durable
_MISSING, _AHEAD, _ASKED, _THERE = 0, 1, 2, 3  # being read in the background, or for a lookup


class TransferCounts:
    """What the downloads of a table read, and from where. *Thread-safe.*

    Attributes:
        from_peers, from_source: bytes of blocks that were right.
        failures: failed attempts to read from a peer, wrong bytes included.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.from_peers = self.from_source = self.failures = 0

    def add(self, *, from_peers: int = 0, from_source: int = 0, failures: int = 0) -> None:
        with self._lock:
            self.from_peers += from_peers
            self.from_source += from_source
            self.failures += failures


class Download(Presence):
    """A row file that is being copied from elsewhere. *Thread-safe.* One lock, never held during I/O.

    Args:
        file: the file elsewhere.
        head: its head.
        path: local name without suffix.
        share: the share whose rows are needed; by default all are.
        beside: files of other tables here; what they have of this content is not read from elsewhere.
        finished: called in the background once the file is complete and durable; calls `rename`.
        counts: of the table.

    Attributes:
        resumed_bytes: bytes that an earlier download left.
    """

    def __init__(
        self,
        file: RowFileSource,
        head: FileHead,
        path: Path,
        finished: Callable[[], None],
        *,
        share: TableShare | None = None,
        counts: TransferCounts | None = None,
        beside: Sequence[RowFile] = (),
    ) -> None:
        self.doubtful = True
        self._share = share
        self._beside = [other for other in beside if head.content and other.head.content == head.content]
        self.head = head
        self.partial = path.with_name(path.name + PARTIAL_SUFFIX)
        self.error: DatabaseError | None = None  # of the background, while it lasts
        self.resumed_bytes = 0
        self._file = file
        self._extents = path.with_name(path.name + EXTENTS_SUFFIX)
        self._finished = finished
        self._counts = counts or TransferCounts()
        self._blocks: npt.NDArray[np.uint8] = np.zeros(-(-head.size_bytes // BLOCK_BYTES), np.uint8)
        self._changed = threading.Condition()
        self._lookups: list[None] = []  # an element for each that waits for parts; the background makes way for them
        self._stopped = False
        self._complete = False
        self._failed = self._renamed = False
        self._descriptor = self._opened()
        weakref.finalize(self, os.close, self._descriptor)  # not before the last thread that may write to it
        self._sums = self._read_sums()
        self._write_start()
        # Lookups never queue behind the background.
        self._asked = ThreadPoolExecutor(2 * file.parallel_reads, thread_name_prefix="hps-row-file-range")
        self._ahead = ThreadPoolExecutor(file.parallel_reads, thread_name_prefix="hps-row-file-download")
        self._needed = np.zeros(self._blocks.size, np.bool_)  # of these blocks; set by `start`
        self._runs: list[tuple[int, int]] = []
        self._worker = new_thread("row-file-download", self._run, lasting=False)

    def start(self, runs: Sequence[tuple[int, int]]) -> None:
        """Begin to read what is needed of the file in the background: ranges of its bytes, beside head and checksums.

        Raises:
            DatabaseError: the disk has no room for them.
        """
        index = [run for run in runs if run[0] >= self.head.starts_at]  # which every lookup needs
        self._runs = [*index, *(run for run in runs if run not in index)]
        for start, stop in runs:
            self._needed[start // BLOCK_BYTES : -(-stop // BLOCK_BYTES)] = True
        self.resumed_bytes = self.bytes_there
        free, needed = shutil.disk_usage(self.partial.parent).free, self.size_bytes - self.resumed_bytes
        if needed > free:
            raise DatabaseError(
                f"downloading {self._file.place} to {self.partial}: it needs {needed:,} bytes, and {free:,} are free; make room"
            )
        self._worker.start()

    # -- state --------------------------------------------------------------------------------------------------------

    @property
    def complete(self) -> bool:
        return self._complete

    def has_bytes(self, start: int, stop: int) -> bool:
        """Return whether bytes [start, stop) are here; head and checksums are from the start."""
        start, stop = max(start, self.head.records_at), min(stop, self.head.sums_at)
        return start >= stop or bool((self._blocks[start // BLOCK_BYTES : -(-stop // BLOCK_BYTES)] == _THERE).all())

    @property
    def size_bytes(self) -> int:
        """Size of what is needed."""
        return self._size_of(self._needed)

    @property
    def bytes_there(self) -> int:
        return self._size_of(self._needed & (self._blocks == _THERE))

    def _size_of(self, blocks: npt.NDArray[np.bool_]) -> int:
        rest = -self.head.size_bytes % BLOCK_BYTES if blocks[-1] else 0
        return int(np.count_nonzero(blocks)) * BLOCK_BYTES - rest

    def _opened(self) -> int:
        """Open the partial file, with the blocks that an earlier download left."""
        doing = f"downloading {self._file.place} to {self.partial}"
        try:
            known = self._known_blocks()
            if known is None:
                self.partial.unlink(missing_ok=True)
                self._extents.unlink(missing_ok=True)
            descriptor = os.open(self.partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                there = os.fstat(descriptor)
                if known is not None and there.st_size == self.head.size_bytes:
                    self._blocks[known] = _THERE
                os.ftruncate(descriptor, self.head.size_bytes)
            except BaseException:
                os.close(descriptor)
                raise
        except OSError as error:
            raise DatabaseError(f"{doing}: {error.strerror or error}") from error
        return descriptor

    def _known_blocks(self) -> npt.NDArray[np.bool_] | None:
        """Read which blocks of this content are durable; None if none are."""
        try:
            text, _, bits = self._extents.read_bytes().partition(b"\n")
            said = json.loads(text)
            if not self.head.content or (said["content"], said["size_bytes"]) != (self.head.content, self.head.size_bytes):
                return None
            return np.unpackbits(np.frombuffer(bits, np.uint8), count=self._blocks.size).astype(np.bool_)
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None

    def _record(self) -> None:
        """Make the present blocks durable, then the record of them."""
        there = self._blocks == _THERE
        os.fdatasync(self._descriptor)
        said = {"content": self.head.content, "size_bytes": self.head.size_bytes, "place": self._file.place}
        fresh = self._extents.with_name(self._extents.name + ".tmp")
        with open(fresh, "wb") as file:
            file.write(json.dumps(said).encode() + b"\n" + np.packbits(there).tobytes())
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(self._extents)
        sync_directory(fresh.parent)

    # -- ranges -------------------------------------------------------------------------------------------------------

    def _read(self, offset: int, buffer: memoryview, *, from_peers: bool) -> str:
        """Read bytes from a peer, or else from the source; return the peer, empty for the source. They are not checked yet."""
        if from_peers and (peers := self._file.peers) is not None:
            peer, failures = peers.read(self.head.content, self.head.size_bytes, offset, buffer)
            self._counts.add(failures=failures)
            if peer:
                return peer
        try:
            self._file.read(offset, buffer)
        except ModelFileError as error:
            raise DatabaseError(f"reading the row file {self._file.place}, which is not complete here: {error}") from error
        return ""

    def _leave(self, peer: str) -> None:
        """Ask a peer no more for a while whose bytes were wrong."""
        if self._file.peers is not None:
            self._counts.add(failures=1)
            self._file.peers.report_damage(peer, self.head.content)

    def _read_sums(self) -> npt.NDArray[np.uint64]:
        """Read the checksums of all pages, two thousandths of the file, and compare them with the head."""
        from_peers = self._file.peers is not None
        while True:
            sums, peers = self._gather_sums(from_peers=from_peers)
            if layout.checksum(sums.view(np.uint8)) == self.head.sums and (
                not self.head.content or layout.content_fingerprint(self.head, sums) == self.head.content
            ):
                return sums
            if not any(peers):
                raise self._damage("its checksums contradict its head")
            for peer in peers - {""}:
                self._leave(peer)
            from_peers = False

    def _gather_sums(self, *, from_peers: bool) -> tuple[npt.NDArray[np.uint64], set[str]]:
        """Read the checksums; return them, not checked yet, and the peers that they came from."""
        sums = np.empty(self.head.pages, np.uint64)
        view, step = sums.view(np.uint8).data, self._file.part_bytes
        with ThreadPoolExecutor(self._file.parallel_reads, thread_name_prefix="hps-row-file-range") as pool:
            parts = [
                pool.submit(self._read, self.head.sums_at + at, view[at : at + step], from_peers=from_peers)
                for at in range(0, len(view), step)
            ]
            return sums, {part.result(_WAIT_S) for part in parts}

    def _write_start(self) -> None:
        """Write the head and the checksums, which are known, so that the file can be opened."""
        head = replace(self.head, share=str(self._share or ""))
        self._write(np.frombuffer(head.packed(), np.uint8).data, 0)
        self._write(self._sums.view(np.uint8).data, self.head.sums_at)

    def _write(self, content: memoryview, at: int) -> None:
        try:
            while content:
                written = os.pwrite(self._descriptor, content, at)
                content, at = content[written:], at + written
        except OSError as error:
            raise DatabaseError(
                f"downloading {self._file.place} to {self.partial}: {error.strerror or error}; make room, or use another volume"
            ) from error

    def _bring(self, state: int, first: int, last: int) -> None:
        """Read blocks [first, last), which were claimed with a state, and mark them."""
        try:
            start, stop = first * BLOCK_BYTES, min(last * BLOCK_BYTES, self.head.size_bytes)
            words = np.empty(-(-(stop - start) // PAGE_BYTES) * (PAGE_BYTES // 8), np.uint64)
            content = words.view(np.uint8).data[: stop - start]
            here = any(other.copy_to(start, content) for other in self._beside)
            tried, from_peers = 0, True
            peer = "" if here else self._read(start, content, from_peers=from_peers)
            while (page := self._damaged_page(words, start, stop)) >= 0:
                if here:
                    here = False
                elif peer:
                    self._leave(peer)
                    from_peers = False
                elif (tried := tried + 1) == _TRIES:
                    raise self._damage(f"the page at byte {page * PAGE_BYTES:,} contradicts its checksum")
                peer = self._read(start, content, from_peers=from_peers)
            # The head and the checksums are written already, as they were checked.
            low, high = max(start, self.head.records_at), min(stop, self.head.sums_at)
            if low < high:
                self._write(content[low - start : high - start], low)
        except BaseException:
            self._give_up(state, first, last)
            raise
        if not here:
            self._counts.add(**{"from_peers" if peer else "from_source": stop - start})
        with self._changed:
            self._blocks[first:last] = _THERE
            self._changed.notify_all()

    def _damaged_page(self, words: npt.NDArray[np.uint64], start: int, stop: int) -> int:
        """Return the first damaged page of bytes [start, stop), or -1."""
        low = max(start, self.head.records_at) // PAGE_BYTES
        high = max(low, min(stop, self.head.sums_at) // PAGE_BYTES)
        skipped, before = low - start // PAGE_BYTES, self.head.records_at // PAGE_BYTES
        sums = self._sums[low - before : high - before]
        page = layout.damaged_page(words[512 * skipped : 512 * (skipped + high - low)], sums, 0, high - low)
        return low + page if page >= 0 else -1

    def _damage(self, why: str) -> DatabaseCorruptError:
        return DatabaseCorruptError(
            f"reading the row file {self._file.place}, which is not complete here: {why}; write it again with `hps seal`"
        )

    def _give_up(self, state: int, first: int, last: int) -> None:
        """Leave blocks to others that were claimed with a state."""
        with self._changed:
            blocks = self._blocks[first:last]
            blocks[blocks == state] = _MISSING
            self._changed.notify_all()

    def _claim(self, state: int, blocks: IndexArray) -> list[tuple[int, int]]:
        """Take the missing ones of these blocks, ascending, and short gaps between them, as ranges. The lock is held.

        Lookups also read what the background is reading: it may take long, or be stuck.
        """
        missing = blocks[self._blocks[blocks] < state]
        if not missing.size:
            return []
        most = max(1, self._file.part_bytes // BLOCK_BYTES)
        ranges: list[tuple[int, int]] = []
        ends = np.flatnonzero(np.append(np.diff(missing) > 1, True))
        begin = 0
        for end in ends.tolist():  # runs of adjacent blocks, not keys
            first, last = int(missing[begin]), int(missing[end]) + 1
            begin = end + 1
            if ranges and first - ranges[-1][1] <= _GAP_BLOCKS and last - ranges[-1][0] <= most:
                gap = self._blocks[ranges[-1][1] : first]
                if (gap < state).all():
                    first = ranges.pop()[0]
            ranges += [(at, min(at + most, last)) for at in range(first, last, most)]
        for first, last in ranges:
            self._blocks[first:last] = state
        return ranges

    # -- lookups ------------------------------------------------------------------------------------------------------

    def doubt(self) -> None:
        """Do nothing: pages are required until the file is complete."""

    def require(self, pages: IndexArray) -> int:
        if self._complete or not pages.size:
            return 0
        blocks = np.unique(pages // _BLOCK_PAGES)
        if (self._blocks[blocks] == _THERE).all():
            return 0
        self._lookups.append(None)
        try:
            return self._require(blocks, time.monotonic() + _WAIT_S)
        finally:
            self._lookups.pop()

    def _require(self, blocks: IndexArray, deadline: float) -> int:
        missing = 0
        while True:
            with self._changed:
                if self._stopped and not self._complete:
                    raise DatabaseError(f"reading the row file {self._file.place}: its download was stopped")
                lacks = blocks[self._blocks[blocks] != _THERE]
                if not lacks.size:
                    return missing
                missing = missing or int(lacks.size) * _BLOCK_PAGES
                ranges = self._claim(_ASKED, lacks)
                if not ranges:  # others bring them
                    if not self._changed.wait(max(0.0, deadline - time.monotonic())) and time.monotonic() >= deadline:
                        raise self._late()
                    continue
            self._bring_all(ranges, deadline)

    def _bring_all(self, ranges: list[tuple[int, int]], deadline: float) -> None:
        if len(ranges) == 1:
            self._bring(_ASKED, *ranges[0])
            return
        running: list[Future[None]] = []
        for i, piece in enumerate(ranges):
            try:
                running.append(self._asked.submit(self._bring, _ASKED, *piece))
            except RuntimeError as error:  # it is closing
                for left in ranges[i:]:
                    self._give_up(_ASKED, *left)
                raise DatabaseError(f"reading the row file {self._file.place}: its download was stopped") from error
        done, late = wait(running, max(0.0, deadline - time.monotonic()))
        for future in done:
            future.result()
        if late:
            raise self._late()

    def _late(self) -> DatabaseTimeoutError:
        return DatabaseTimeoutError(
            f"reading the row file {self._file.place}, which is not complete here: parts did not arrive within {_WAIT_S:g} s"
        )

    # -- in the background --------------------------------------------------------------------------------------------

    def _order(self) -> Iterator[tuple[int, int]]:
        """Yield the ranges of blocks that are needed, those of the index first."""
        most = max(1, self._file.part_bytes // BLOCK_BYTES)
        for start, stop in self._runs:
            last = -(-stop // BLOCK_BYTES)
            for at in range(start // BLOCK_BYTES, last, most):
                yield at, min(at + most, last)

    def _run(self) -> None:
        pause = _PAUSE_S
        while not self._stopped:
            try:
                if self._bring_rest():
                    with suppress(OSError):
                        self._record()
                    self._finish()
                return
            except (HPSError, OSError) as error:
                self.error = error if isinstance(error, DatabaseError) else DatabaseError(str(error))
                final = isinstance(error, DatabaseCorruptError) or isinstance(error.__cause__, ModelFileChangedError)
                _log.warning(
                    "The download of %s has %d of %d bytes: %s; %s.",
                    self._file.place,
                    self.bytes_there,
                    self.size_bytes,
                    error,
                    "it ends here" if final else "it is tried again",
                )
                if final:
                    with self._changed:
                        self._failed = True
                        self._changed.notify_all()
                    return
            except RuntimeError as error:  # its threads are told to end, by `stop` or by the interpreter's exit
                if not self._stopped and "shutdown" not in str(error):
                    raise
                return
            with self._changed:
                self._changed.wait_for(lambda: self._stopped, pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _bring_rest(self) -> bool:
        """Read all missing blocks, several ranges at a time; return False if that is to end before."""
        running: set[Future[None]] = set()
        recorded = time.monotonic()
        try:
            for first, last in self._order():
                with self._changed:
                    if self._stopped:
                        return False
                    ranges = self._claim(_AHEAD, np.arange(first, last))
                for piece in ranges:
                    running.add(self._ahead.submit(self._bring, _AHEAD, *piece))
                while len(running) >= (max(1, self._file.parallel_reads // 4) if self._lookups else self._file.parallel_reads):
                    running = self._collect(running)
                if time.monotonic() - recorded > _RECORDED_S:
                    self._record()
                    recorded = time.monotonic()
                self.error = None
            while running:
                running = self._collect(running)
        finally:
            for future in running:
                with suppress(Exception):
                    future.result(_WAIT_S)
        with self._changed:  # blocks that lookups are bringing
            if not self._changed.wait_for(lambda: self._stopped or not (self._blocks == _ASKED).any(), _WAIT_S):
                raise DatabaseTimeoutError(f"downloading {self._file.place}: parts did not arrive within {_WAIT_S:g} s")
            if self._stopped:
                return False
            if (self._blocks[self._needed] != _THERE).any():
                raise DatabaseError(f"downloading {self._file.place}: a lookup could not read a part of it")
            return True

    @staticmethod
    def _collect(running: set[Future[None]]) -> set[Future[None]]:
        done, left = wait(running, _WAIT_S, FIRST_COMPLETED)
        for future in done:
            future.result()
        return left

    def _finish(self) -> None:
        os.fsync(self._descriptor)
        os.fchmod(self._descriptor, 0o444)
        self._complete, self.error, self._beside = True, None, []
        self.doubtful = False
        self._finished()
        _log.info("The download of %s is complete: %d bytes.", self._file.place, self.size_bytes)
        with self._changed:
            self._renamed = True
            self._changed.notify_all()
        self._asked.shutdown(wait=False)
        self._ahead.shutdown(wait=False)

    def rename(self, path: Path) -> None:
        """Give the complete file its name, durably on return. Nothing else is left of the download."""
        self.partial.replace(path)
        sync_directory(path.parent)
        self._extents.unlink(missing_ok=True)  # a start removes it beside a complete file

    def wait(self, timeout_s: float) -> bool:
        """Wait until the file is complete and has its name; return False if it is not.

        Raises:
            DatabaseError: the download has ended.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._renamed or self._stopped or self._failed, timeout_s)
        if not self._renamed and (self._stopped or self._failed):
            raise self.error or DatabaseError(f"downloading {self._file.place}: it was stopped")
        return self._renamed

    def stop(self, timeout_s: float) -> None:
        """End the download, and record what is there. Readers get errors from now on."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._asked.shutdown(wait=False, cancel_futures=True)
        self._ahead.shutdown(wait=False, cancel_futures=True)
        if self._worker.ident is not None and self._worker is not threading.current_thread():
            self._worker.join(timeout_s)
        if not self._complete:
            with suppress(OSError):
                self._record()

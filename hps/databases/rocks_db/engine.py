"""RocksDB through rocksdict's raw mode, which no other module imports: bytes in, bytes out, typed errors, bounded waits.

What the binding does not say and this module minds (each seen with rocksdict 0.3.29):

- `write`, `ingest_external_file` and every `SstFileWriter` call hold the interpreter lock; multi-gets, `flush`, `flush_wal`
  and `compact_range` do not. So a write must never wait inside RocksDB, and an ingest has nothing left to flush.
- An iterator that meets a damaged block ends as it does at the last row; only `RdictIter.status` tells.
- Iterators keep the database open, and its directory locked, until they are freed. None outlives a call here.
- `compact_range` reports no error; RocksDB counts it as a background error.
"""

import logging
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import rocksdict

from hps.databases.rocks_db.errors import EngineErrors, WriteStalledError
from hps.errors import DatabaseError

_log = logging.getLogger(__name__)

Family = Any
"""A column family: rocksdict.Rdict."""

DEFAULT = "default"
"""RocksDB's own column family."""

_BLOCK_BYTES = 2048
_LOAD_FILES = 256  # ingested files that may lie side by side: below the usual limit of 1024 open files
_MERGE_READ_BYTES = 64 << 10  # read ahead, of each of these files, in each of these threads
_MERGE_THREADS = 4  # also where there are fewer cores: each waits for the disk half of its time
_MERGE_PARTS = 16
_FILE_BYTES = (16 << 20, 256 << 20)  # of a merged file, least and most: few open files, however large the table
_WRITE_BUFFERS_BYTES = 128 << 20  # of all tables together
_STALL_POLL_S = 0.01
_SIDE_BY_SIDE = "num-files-at-level0"


class Engine:
    """One open RocksDB. *Thread-safe*, but for `close`, which must be the last call, alone.

    Args:
        path: the directory, as errors name it.
        place: the directory to open: the same one, or a view of it.
        exists: whether a database is there.
        read_only: open it without the lock of its directory.
        num_threads: for flushing and compacting.
        block_cache_bytes: 0 for none.
        write_timeout_s: how long a write may be held back.
    """

    def __init__(
        self,
        path: Path,
        place: Path,
        *,
        exists: bool,
        read_only: bool,
        num_threads: int,
        block_cache_bytes: int,
        write_timeout_s: float,
    ) -> None:
        self._path = path
        self._write_timeout_s = write_timeout_s
        self._options = _options(num_threads, block_cache_bytes)
        self._refuse = rocksdict.WriteOptions()
        self._refuse.no_slowdown = True
        self._move = rocksdict.IngestExternalFileOptions()
        self._move.set_move_files(True)
        access = rocksdict.AccessType.read_only(False) if read_only else rocksdict.AccessType.read_write()
        with self._errors("opening the database"):
            names = rocksdict.Rdict.list_cf(str(place)) if exists else [DEFAULT]
            self._db: Any = rocksdict.Rdict(str(place), self._options, dict.fromkeys(names, self._options), access)
            self._families: dict[str, Family] = {name: self._db.get_column_family(name) for name in names}

    def _errors(self, doing: str) -> EngineErrors:
        return EngineErrors(doing, self._path)

    def names(self) -> list[str]:
        """The column families, but for RocksDB's own."""
        return [name for name in list(self._families) if name != DEFAULT]

    def family(self, name: str) -> Family | None:
        """A column family, None where there is none of this name."""
        return self._families.get(name)

    def create(self, name: str) -> Family:
        """Add a column family. Callers see to it that one thread at a time creates or drops."""
        with self._errors(f"creating table {name}"):
            family = self._families[name] = self._db.create_column_family(name, self._options)
        return family

    def drop(self, name: str) -> None:
        """Remove a column family; who still reads it may go on."""
        with self._errors(f"dropping table {name}"):
            self._db.drop_column_family(name)
        del self._families[name]

    def close(self) -> None:
        """Release the directory. What is in memory only is in the write-ahead log, too, so nothing is lost if this fails."""
        while self._families:
            _, family = self._families.popitem()
            self._close(family)
        self._close(self._db)

    def _close(self, database: Any) -> None:
        try:
            with self._errors("closing the database"):
                database.close()
        except DatabaseError as error:
            _log.warning("%s; it is closed, and its write-ahead log is read at the next opening", error)

    # -- reading ------------------------------------------------------------------------------------------------------

    def get(self, family: Family, keys: list[bytes], doing: str) -> list[bytes | None]:
        """The values of keys in RocksDB's order, None where there is none. Lets other threads run."""
        with self._errors(doing):
            values: list[bytes | None] = family.get(keys)
        return values

    def read(self, family: Family, start: bytes, rows: int, doing: str) -> list[bytes]:
        """Key, value, key, value, ... of at most `rows` rows from `start` on; fewer only where the table ends."""
        return self._iterate(lambda at: chain.from_iterable(family.items(from_key=at)), 2, family, start, rows, doing)

    def read_keys(self, family: Family, start: bytes, rows: int, doing: str) -> list[bytes]:
        """Keys of at most `rows` rows from `start` on; fewer only where the table ends."""
        return self._iterate(lambda at: family.keys(from_key=at), 1, family, start, rows, doing)

    def _iterate(
        self, open_at: Callable[[bytes], Iterable[bytes]], width: int, family: Family, start: bytes, rows: int, doing: str
    ) -> list[bytes]:
        fields: list[bytes] = []
        with self._errors(doing):
            while len(fields) < rows * width:
                fields += islice(open_at(start), rows * width - len(fields))
                start = after(fields[-width]) if fields else start
                if len(fields) < rows * width and not self._goes_on(family, start):
                    break
        return fields

    def _goes_on(self, family: Family, start: bytes) -> bool:
        probe = family.iter()
        try:
            probe.seek(start)
            valid: bool = probe.valid()
            if not valid:
                probe.status()
            return valid
        finally:
            del probe  # an error's traceback would keep it, and it the database, alive

    def figure(self, family: Family, name: str) -> int:
        """An integer property of a column family, such as `estimate-num-keys`; 0 where RocksDB does not know it."""
        with self._errors("reading properties"):
            return int(family.property_value(f"rocksdb.{name}") or 0)

    # -- writing ------------------------------------------------------------------------------------------------------

    def put(self, name: str, keys: list[bytes], values: list[bytes], doing: str) -> None:
        """Add or replace rows, all at once; of equal keys the last counts. On disk after `sync`."""
        self._write(name, lambda batch: map(batch.__setitem__, keys, values), doing)

    def remove(self, name: str, keys: list[bytes], doing: str) -> None:
        """Remove rows, all at once. On disk after `sync`."""
        self._write(name, lambda batch: map(batch.__delitem__, keys), doing)

    def _write(self, name: str, fill: Callable[[Any], Iterator[None]], doing: str) -> None:
        give_up = time.monotonic() + self._write_timeout_s
        while True:
            with self._errors(doing):
                batch = rocksdict.WriteBatch(raw_mode=True)
                batch.set_default_column_family(self._db.get_column_family_handle(name))
                deque(fill(batch), maxlen=0)
            try:
                with self._errors(doing):
                    self._db.write(batch, self._refuse)
                return
            except WriteStalledError:
                if time.monotonic() >= give_up:
                    raise
            time.sleep(_STALL_POLL_S)

    def sync(self, doing: str) -> None:
        """Return when every write before is on disk."""
        with self._errors(doing):
            self._db.flush_wal(True)

    # -- loading ------------------------------------------------------------------------------------------------------

    def begin_load(self, family: Family, doing: str) -> None:
        """Let files lie side by side until `settle`: merging them all the while would write every row many times."""
        self._merge_by_itself(family, False, doing)

    def stage(self, pieces: Iterable[tuple[list[bytes], list[bytes]]], staged: Path, doing: str) -> None:
        """Write rows to a file for `ingest`.

        Args:
            pieces: keys and values, strictly ascending over all pieces, at least one row.
            staged: the file, on the file system of the database.
        """
        with self._errors(doing):
            writer = rocksdict.SstFileWriter(self._options)
            writer.open(str(staged))
            for keys, values in pieces:
                deque(map(writer.__setitem__, keys, values), maxlen=0)
            writer.finish()

    def ingest(self, family: Family, staged: Path, doing: str) -> None:
        """Add or replace the rows of a staged file, which is moved into the database; on disk on return."""
        if self.figure(family, _SIDE_BY_SIDE) >= _LOAD_FILES:
            self._merge(family, doing)
        with self._errors(doing):
            family.flush()  # the ingest would do it, but with the interpreter lock held
            family.ingest_external_file([str(staged)], self._move)

    def settle(self, family: Family, doing: str) -> None:
        """Merge what was ingested, so that a read looks at one file; then merge as it grows, as usual.

        Raises:
            DatabaseError: the merge failed. The rows are all there.
        """
        with self._errors(doing):
            family.flush()
        if self.figure(family, _SIDE_BY_SIDE):
            self._merge(family, doing)
        self._merge_by_itself(family, True, doing)

    def _merge(self, family: Family, doing: str) -> None:
        wanted, free = self.figure(family, "live-sst-files-size"), shutil.disk_usage(self._path).free
        if free < wanted:
            _log.warning("%s in %s: not merged, so reads are slow: %d bytes free, wanted %d", doing, self._path, free, wanted)
            return
        options = rocksdict.CompactOptions()
        options.set_exclusive_manual_compaction(False)
        failures = self.figure(family, "background-errors")
        least, most = _FILE_BYTES
        with self._errors(doing):
            # A thread merges no less than one file's worth: with files as large as usual, one would merge a small table alone.
            family.set_options({"target_file_size_base": str(max(least, min(wanted // _MERGE_PARTS, most)))})
            family.compact_range(None, None, options)
            family.set_options({"target_file_size_base": str(most)})
        if self.figure(family, "background-errors") > failures:
            raise DatabaseError(f"{doing} in {self._path}: merging its files failed; the newest LOG there says why")

    def _merge_by_itself(self, family: Family, on: bool, doing: str) -> None:
        with self._errors(doing):
            family.set_options({"disable_auto_compactions": "false" if on else "true"})


def after(key: bytes) -> bytes:
    """The first possible key behind `key`."""
    return key + b"\0"


def _options(num_threads: int, block_cache_bytes: int) -> "rocksdict.Options":
    block = rocksdict.BlockBasedOptions()
    block.set_format_version(5)  # RocksDB 6.6 and later read it, HugeCTR's among them
    block.set_block_size(_BLOCK_BYTES)
    block.set_block_restart_interval(4)
    block.set_index_block_restart_interval(4)  # no slower than 1, and at dim 128 two fifths less memory
    block.set_data_block_index_type(rocksdict.DataBlockIndexType.binary_and_hash())
    block.set_data_block_hash_ratio(0.75)
    block.set_bloom_filter(10, False)
    if block_cache_bytes:
        block.set_block_cache(rocksdict.Cache.new_hyper_clock_cache(block_cache_bytes, _BLOCK_BYTES))
    else:
        block.disable_cache()
    options = rocksdict.Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_block_based_table_factory(block)
    options.set_compression_type(rocksdict.DBCompressionType.none())
    options.set_memtable_prefix_bloom_ratio(0.02)
    options.set_memtable_whole_key_filtering(True)
    options.increase_parallelism(num_threads)
    options.set_max_subcompactions(min(num_threads, _MERGE_THREADS))
    options.set_compaction_readahead_size(_MERGE_READ_BYTES)
    options.set_target_file_size_base(_FILE_BYTES[1])
    options.set_db_write_buffer_size(_WRITE_BUFFERS_BYTES)
    options.set_max_total_wal_size(2 * _WRITE_BUFFERS_BYTES)
    # Files that lie side by side make reads slower; holding back writes would not help those reads.
    options.set_level_zero_slowdown_writes_trigger(1 << 20)
    options.set_level_zero_stop_writes_trigger(1 << 20)
    options.set_soft_pending_compaction_bytes_limit(0)
    options.set_hard_pending_compaction_bytes_limit(0)
    options.set_max_log_file_size(16 << 20)
    options.set_keep_log_file_num(4)
    options.set_stats_dump_period_sec(0)
    options.set_stats_persist_period_sec(0)
    return options

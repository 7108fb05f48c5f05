"""The CUDA kernels of the embedding cache: their source, specialisations, arguments and launch geometry.

Imports no CuPy: `device.py` passes the compiler in. Each file of `cuda/` documents its kernel.
"""

import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, reduce
from importlib.resources import files
from operator import or_
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hps.cache.base import static_sets
from hps.cache.cuda import structs
from hps.cache.integrity import hashes_of
from hps.ground.memory.host_tables import DENSE_ROWS_AT, FileLayout
from hps.ground.shares import SHARE_SEED
from hps.tensors.bags import Arithmetic
from hps.types import ROW_DTYPES, TableSpec, row_width

SLOTS = 7
"""Slots per bucket."""
PAIR_BYTES = 128
"""Size of two buckets: versions, scores and keys."""
SHARING_BYTES = 256
"""Bytes before each copy of the buckets of a shared table, which begin with a `Sharing`."""
SEGMENTS_AT_ONCE = 32
"""Maximum number of segments per launch; more need several launches."""
FEW_KEYS = 1 << 14
"""Up to this number of keys, a query takes as long as its slowest warp, and has more loads in flight."""
TOO_MANY = 0xFFFFFFFF
"""Reported by `unique` instead of a count if a segment has more misses than it sorts itself."""
REPLACE, ADMIT = 1, 2
"""Modes of `insert`: replace the vectors of resident keys, make other keys resident. ADMIT alone applies admission."""

THREADS = 256
QUERY_THREADS = 128
UNIQUE_THREADS = 512
STRIPES = 1024
"""Number of stripes of a table; readers detect changes by the version of a stripe."""
MOST_HOST_SEGMENTS = 16
"""Maximum number of segments of a table in host memory."""
MOST_BAGS = 32
"""Maximum number of lane groups that add up bags together."""
WIDE_OFFSETS, LAST_OFFSET, PADDED = 4, 8, 16
"""Options of a pooled segment, combined with its combiner."""
MOST_BINS = 1024
"""Maximum number of bins for the misses of a large lookup, over all its tables."""

_INCLUDE = re.compile(r'^#include "(\w+\.cuh)"$', re.MULTILINE)


ALIGNED = 0
"""Of `outputs_code`: outputs of float32 that are aligned to 16 bytes."""
FLOAT16, BFLOAT16 = 1, 2
"""Formats of outputs beside float32, as `cuda/rows.cuh` numbers them."""
_FORMAT_SHIFT = 28  # of a segment's units, see `cuda/rows.cuh`


class Rows(NamedTuple):
    """How a table's rows are stored: elements of a vector, and the place in ROW_DTYPES. *Immutable.*"""

    dim: int
    dtype: int = 0

    @classmethod
    def of(cls, spec: TableSpec) -> "Rows":
        return cls(spec.dim, ROW_DTYPES.index(spec.row_dtype))

    @property
    def width(self) -> int:
        """Words of 4 bytes of a row."""
        return row_width(self.dim, ROW_DTYPES[self.dtype])


class Shape(NamedTuple):
    """What kernels for one launch have in common. *Immutable.*

    Attributes:
        unit: elements that a lane moves at once.
        widest, most_words: elements of the longest vector, words of the widest row.
        segments: 1, or SEGMENTS_AT_ONCE for up to as many.
        formats: bit f: some rows are of format f.
        piece: words of a row that a lane moves at once.
        out: format of the outputs' elements.
        files: the tables in host memory are row files, for kernels that read these.
    """

    unit: int
    widest: int
    most_words: int
    segments: int
    formats: int
    piece: int
    out: int = 0
    files: bool = False

    @classmethod
    def of(cls, rows: Sequence[Rows], outputs: int) -> "Shape":
        """Find the shape of a launch.

        Args:
            rows: of the table of each segment.
            outputs: see `outputs_code`.
        """
        unit, out = unit_of(reduce(or_, [row.dim for row in rows]), outputs & 15), outputs >> 4
        widths = [row.width for row in rows]
        segments = 1 if len(rows) == 1 else SEGMENTS_AT_ONCE
        formats = reduce(or_, [1 << row.dtype for row in rows])
        return cls(unit, max(row.dim for row in rows), max(widths), segments, formats, unit_of(reduce(or_, widths), 16), out)

    def units(self, rows: Rows) -> int:
        """Return the units of a vector, with the format of its row where that differs by segment."""
        mixed = self.formats & (self.formats - 1)
        return rows.dim // self.unit | (rows.dtype << _FORMAT_SHIFT if mixed else 0)

    @property
    def constants(self) -> tuple[tuple[str, int], ...]:
        """Macros of `cuda/rows.cuh`; none where all rows are float32."""
        formats = () if self.formats == 1 else (("FORMATS", self.formats),)
        return (*formats, ("OUT", self.out)) if self.out else formats


@dataclass(frozen=True, slots=True)
class Kernel:
    """A specialised kernel. *Immutable*; equal kernels have the same code.

    Attributes:
        name: function name.
        file: in `cuda/`, without the suffix.
        constants: macros that specialise it.
    """

    name: str
    file: str
    constants: tuple[tuple[str, int], ...] = ()

    @property
    def code(self) -> str:
        """Self-contained CUDA C++: the constants, and the file with its headers pasted in.

        Pasted, because CuPy's kernel cache ignores the content of included files.
        """
        defines = "".join(f"#define HPS_{name} {value}\n" for name, value in self.constants)
        return defines + source(self.file)


Compile = Callable[[str, str], int]
"""Compiles code and returns the handle of the named function: `(code, name) -> CUfunction`."""


class KernelCache:
    """The compiled kernels of one device. *Thread-safe.* Compiles each once, on first use."""

    def __init__(self, compile_kernel: Compile) -> None:
        self._compile = compile_kernel
        self._handles: dict[Kernel, int] = {}
        self._compiling: dict[Kernel, threading.Lock] = {}
        self._lock = threading.Lock()

    def handle(self, kernel: Kernel) -> int:
        """Return the CUfunction of a kernel. Threads compile different kernels concurrently."""
        handle = self._handles.get(kernel)
        if handle is None:
            with self._lock:
                compiling = self._compiling.setdefault(kernel, threading.Lock())
            with compiling:
                handle = self._handles.get(kernel)
                if handle is None:
                    handle = self._handles[kernel] = self._compile(kernel.code, kernel.name)
        return handle


@cache
def source(file: str) -> str:
    """Return the text of `cuda/<file>.cu` with its own headers pasted in."""
    directory = _directory()
    return _INCLUDE.sub(lambda match: (directory / match[1]).read_text(), (directory / f"{file}.cu").read_text())


@cache
def _directory() -> Path:
    packaged = Path(str(files("hps"))) / "_cuda"
    return packaged if packaged.is_dir() else Path(str(files("hps"))).parent / "cuda"


def outputs_code(addresses: int, out_format: int) -> int:
    """Return what kernels depend on of outputs: their alignment in units of 4 elements, and from bit 4 on their format.

    Args:
        addresses: those of the outputs, combined by OR.
    """
    return (addresses << 1 & 15) | out_format << 4 if out_format else addresses & 15


@cache
def unit_of(dim: int, alignment: int) -> int:
    """Return the floats that a thread moves at once: the most that divide a row and respect its array's alignment.

    Args:
        alignment: an address modulo 16, or several combined by OR; 0 or 16 for the best.
    """
    return next(unit for unit in (4, 2, 1) if dim % unit == 0 and alignment % (4 * unit) == 0)


def _copy_lanes(unit: int, widest: int) -> int:
    """Return the number of lanes that move one row of at most `widest` floats."""
    units = -(-widest // unit)
    return next((lanes for lanes in (4, 8, 16, 32) if lanes >= units), 32)


class Kind(NamedTuple):
    """What kernels for the tables of one cache have in common. *Immutable.*

    Attributes:
        static: the tables hold every row; see `cuda/static_tables.cuh`.
        shared: several devices share the tables; see `cuda/sharing.cuh`.
    """

    static: bool = False
    shared: bool = False

    @property
    def constants(self) -> tuple[tuple[str, int], ...]:
        return ((("STATIC", 1),) if self.static else ()) + ((("SHARED", 1),) if self.shared else ())


DYNAMIC, STATIC = Kind(), Kind(static=True)


def query_kernel(shape: Shape, kind: Kind = DYNAMIC, *, settles: bool = False, few: bool = False) -> Kernel:
    """Return the query of a shape.

    Args:
        settles: the tables are static and complete: keys that are not resident are absent.
        few: for at most FEW_KEYS keys, 8 a warp.
    """
    units = -(-shape.widest // shape.unit)
    copy = _copy_lanes(shape.unit, shape.widest)
    loads = min(4 if shape.formats & 1 and not (few and shape.formats == 1) else 8, copy // 4)
    blocks = (5 if loads == 8 else 8) if few else (12 if copy <= 8 else 8) if kind.shared else 16 if copy <= 8 else 10
    return Kernel(
        "query",
        "query",
        (
            ("UNIT", shape.unit),
            ("COPY", copy),
            ("ROW_LOADS", loads),
            ("LONG_ROWS", int(units > copy)),
            ("SEGMENTS", shape.segments),
            ("MIN_BLOCKS", blocks),
            *shape.constants,
            *kind.constants,
            *((("SETTLES", 1), ("PATIENCE", 1 << 14)) if settles else ()),
            *((("FEW", 1),) if few else ()),
        ),
    )


ANSWERS = ("answer", "admit_answers")
"""The kernels of `cuda/answer.cu`."""


def answer_kernel(name: str, shape: Shape, kind: Kind = DYNAMIC) -> Kernel:
    """Return one of ANSWERS, for the misses of a query of a shape."""
    sizes: tuple[tuple[str, int], ...] = (
        ("UNIT", shape.unit),
        ("COPY", _copy_lanes(shape.unit, shape.widest)),
        ("SEGMENTS", shape.segments),
    )
    piece = shape.unit
    if by_parts(shape):
        piece = shape.piece
        # A row may begin anywhere in its first part, after its key if it is one of a file.
        before = 4 + shape.most_words % 2 if shape.files else 4 - piece
        parts = -(-(shape.most_words + before) // 4)
        lanes = next((lanes for lanes in (4, 8, 16) if lanes >= parts), 32)
        sizes += (("PIECE", piece), ("PART_LANES", lanes), ("LONG_PARTS", int(parts > lanes)), *shape.constants)
    if shape.files:
        sizes += (("ROW_FILES", 1), ("SHARE_SEED", int(SHARE_SEED)))
    loads = _row_loads(piece, shape.most_words)
    shared = Kind(shared=kind.shared).constants  # of static tables, nothing is admitted
    return Kernel(name, "answer", (*sizes, *loads, ("THREADS", answer_threads(shape)), *shared))


def by_parts(shape: Shape) -> bool:
    """Whether `answer` reads rows by parts of 16 bytes, and admits them from staged rows alone."""
    return shape.formats != 1 or shape.out != 0 or shape.files


def staged_words(shape: Shape, rows: Rows) -> int:
    return -(-rows.width // 4) * 4 if by_parts(shape) else rows.width


def answer_threads(shape: Shape) -> int:
    """Return the threads of each block of `answer`: more where narrow rows need few registers."""
    return 512 if _copy_lanes(shape.unit, shape.widest) <= 8 else 256


POOLS = ("pool", "number", "pool_rest")
"""The kernels of `cuda/pool.cu`."""


def pool_kernel(name: str, shape: Shape, arithmetic: Arithmetic, kind: Kind = DYNAMIC) -> Kernel:
    """Return one of POOLS, for bags; arguments as for `query_kernel`.

    Args:
        arithmetic: that of all segments.
    """
    unit, widest = shape.unit, shape.widest
    copy = _copy_lanes(unit, widest)
    chunks = 1 << (-(-widest // (unit * copy)) - 1).bit_length()
    rows = min(copy, max(1, 8 // chunks))  # rows in flight; more of them or more warps are slower (cuda/pool.cu)
    blocks = 1 if name != "pool" or chunks > 2 else 5 if arithmetic is Arithmetic.SUMS else 4
    sizes = (("UNIT", unit), ("COPY", copy), ("CHUNKS", chunks), ("KEYS", rows), ("MIN_BLOCKS", blocks))
    does: tuple[tuple[str, int], ...] = ()
    if name != "number":  # which reads no vector
        does = ("PLAIN", int(arithmetic is Arithmetic.SUMS)), ("MAXIMA", int(arithmetic is Arithmetic.MAXIMA))
    constants = kind.constants if name == "pool" else ()
    return Kernel(name, "pool", (*sizes, *does, ("SEGMENTS", shape.segments), *shape.constants, *constants))


def pool_groups(shape: Shape) -> int:
    """Return the number of lane groups in a block of `pool`; each takes bags of its own."""
    return QUERY_THREADS // _copy_lanes(shape.unit, shape.widest)


def bags_per_group(keys: int, bags: int, total: int) -> int:
    """Return the number of bags per group for a segment of `keys` keys and `bags` bags, in a lookup of `total` keys.

    Enough for about 64 keys, since a group takes 32 at once; fewer if the lookup would not fill the device.
    """
    wanted = 64 if total >= 1 << 18 else max(8, total >> 12)
    return min(MOST_BAGS, max(1, wanted * bags // max(keys, 1)))


def fetch_warps(width: int, blocks: int, threads: int, *, dense: bool = False) -> int:
    """Return the warps of each block of `answer` that read rows of up to `width` words, 8 at once, if there are many.

    Together they read 1.3 MB of buckets and rows, or 1 MB of rows alone: enough to hide the latency of the link, and few, since
    rows read at once should be adjacent in host memory. Of 262,144 keys of dim 32 by popularity, of a dense table of 2^24 rows
    on an H200, 8 and 12 warps a block take 0.58 and 0.65 ms, 5 warps 0.77.

    Args:
        dense: all tables are dense, so that no bucket is read.
    """
    warps = 4 * max(33_792 // (4 * width) if dense else 42_240 // (128 + 4 * width), 33)
    return min(threads // 32, max(1, round(warps / blocks)))


def many_fetch_warps(warps: int, threads: int) -> int:
    """Return the warps instead of `fetch_warps` for a large lookup of row files, most of whose keys are missing.

    On an H200, 262,144 records of 520 bytes take 3.5 ms with 4 warps a block and 4.9 ms with 2; 32,768 take 1.1 ms with 2.
    """
    return min(threads // 32, 2 * warps)


def insert_kernel(piece: int, width: int, kind: Kind = DYNAMIC) -> Kernel:
    """Return the insertion or update of rows of `width` words."""
    loads = _row_loads(piece, width)
    blocks = 3 if kind.shared else 4 if kind.static else 8 if dict(loads)["ROW_LOADS"] == 1 else 5
    return Kernel("insert", "insert", (("UNIT", piece), *loads, ("MIN_BLOCKS", blocks), *kind.constants))


def erase_kernel(kind: Kind = DYNAMIC) -> Kernel:
    return Kernel("erase", "erase", kind.constants)


def dump_kernel(kind: Kind = DYNAMIC) -> Kernel:
    return Kernel("dump", "dump", kind.constants)


def promote_kernel(piece: int, width: int) -> Kernel:
    """Return the admission of sampled rows of `width` words to a near table."""
    return Kernel("promote", "promote", (("UNIT", piece), *_row_loads(piece, width), *Kind(shared=True).constants))


def _row_loads(piece: int, widest: int) -> tuple[tuple[str, int], tuple[str, int]]:
    """Return how a tile of 8 lanes loads rows of up to `widest` words: pieces a lane has in flight, whether there are more."""
    units = -(-widest // (piece * 8))
    loads = min(units, 2) if units <= 2 else 4
    return ("ROW_LOADS", loads), ("LONG_ROWS", int(units > loads))


def scatter_kernel(shape: Shape) -> Kernel:
    return Kernel("scatter", "scatter", (("UNIT", shape.unit), *shape.constants))


def shape_of(tables: Sequence[Rows], segments: Sequence[int], outputs: int) -> Shape:
    """Return the shape of a launch for some of a cache's tables.

    Args:
        tables: all tables of the cache.
        segments: the table of each segment.
        outputs: see `outputs_code`.
    """
    # Tables of different rows take the shape of all tables of the cache. It fits every subset, and is compiled before the first
    # lookup; the shapes of all subsets would be too many.
    same = len({tables[table] for table in segments}) == 1
    shape = Shape.of([tables[segments[0]]] if same else tables, outputs)
    return shape if len(segments) == 1 else shape._replace(segments=SEGMENTS_AT_ONCE)


def _shapes(tables: Sequence[Rows]) -> list[Shape]:
    """Return the shapes of lookups of one segment, and of several, with aligned outputs."""
    places = [tables.index(rows) for rows in sorted(set(tables))]
    choices = [*((place,) * times for place in places for times in (1, 2)), range(len(tables))]
    return list(dict.fromkeys(shape_of(tables, segments, ALIGNED) for segments in choices))


def lookup_kernels(tables: Sequence[Rows], kind: Kind = DYNAMIC) -> list[Kernel]:
    """Return the kernels for lookups of rows and bags, with aligned outputs; others are compiled on first use."""
    found = [UNIQUE, MARK_HEADS, RANK_SORTED_KERNEL]
    for shape in _shapes(tables):
        for few in (False, True):
            found += [query_kernel(shape, kind, settles=settles, few=few) for settles in sorted({False, kind.static})]
        found += [pool_kernel(name, shape, arithmetic, kind) for name in POOLS for arithmetic in Arithmetic]
        if shape.segments == 1:
            found.append(scatter_kernel(shape))
    return found


def link_kernels(tables: Sequence[Rows], kind: Kind = DYNAMIC, *, files: bool = False) -> list[Kernel]:
    """Return the kernels that read tables in host memory; `files`: those of row files."""
    return [answer_kernel(name, shape._replace(files=files), kind) for shape in _shapes(tables) for name in ANSWERS]


def modification_kernels(tables: Sequence[Rows], kind: Kind = DYNAMIC) -> list[Kernel]:
    """Return the kernels that modifications of tables launch."""
    inserts = [insert_kernel(unit_of(width, 16), width, kind) for width in {rows.width for rows in tables}]
    return [*inserts, erase_kernel(kind), dump_kernel(kind)]


MIRROR_KERNEL = Kernel("mirror", "mirror")
UNIQUE = Kernel("unique", "unique", (("SEGMENTS", SEGMENTS_AT_ONCE),))
MARK_HEADS = Kernel("mark_heads", "unique", (("SEGMENTS", SEGMENTS_AT_ONCE),))
RANK_SORTED_KERNEL = Kernel("rank_sorted", "unique", (("SEGMENTS", SEGMENTS_AT_ONCE),))


def near_kernels(tables: Sequence[Rows]) -> list[Kernel]:
    promotions = [promote_kernel(unit_of(width, 16), width) for width in {rows.width for rows in tables}]
    return [*modification_kernels(tables), *promotions]


def tile_blocks(items: int) -> int:
    """Return the blocks of THREADS for a kernel in which 8 threads own one item: insert, erase, dump, scatter, mirror."""
    return -(-items // (THREADS // 8))


def sorted_blocks(misses: int) -> int:
    """Return the blocks of UNIQUE_THREADS for mark_heads and rank_sorted."""
    return -(-misses // UNIQUE_THREADS)


def host_layout(
    words: list[int],
    where: int,
    slabs: int,
    slab_count: int,
    known: int,
    mirrored: int = 0,
    mirrors: Sequence[int] = (),
    file: FileLayout | None = None,
    index: tuple[int, int] = (0, 0),
    number: int = 0,
) -> bytes:
    """Pack a table's layout as `cuda/host_table.cuh` defines it.

    Args:
        words: those of its `HostLayout`.
        where: its future address on the device.
        slabs: device address of the array of slab addresses.
        slab_count: number of slabs.
        known: device address of the versions of the stripes that readers have found.
        mirrored: device address of the versions that its mirror was copied at; 0 without one.
        mirrors: device addresses of the copies of its segments.
        file: its row file, if any.
        index: device addresses of the file's starts and fingerprints.
        number: that of its `HostLayout`.
    """
    _, slab_shift, row_bytes, _, segment_bits, versions, dense_rows, _, _, *segments = words
    head = (where, slabs, versions, slab_count, slab_shift, row_bytes, segment_bits)
    no_segments, no_mirrors = [0] * (2 * MOST_HOST_SEGMENTS - len(segments)), [0] * (MOST_HOST_SEGMENTS - len(mirrors))
    of_file: tuple[int | float, ...] = (0, 0, 0, 0, 0.0, number, 0, 0)
    if file is not None:
        of_file = (file.records, *index, file.rows, file.rows / file.buckets, number, file.buckets, file.record_bytes)
    return structs.HOST_LAYOUT.pack(
        *head, *segments, *no_segments, dense_rows, mirrored, *mirrors, *no_mirrors, *of_file, known
    )


def bins_per_row(words: Sequence[int]) -> float:
    """Return the share of a bin that a row takes where the misses of a table are put into the order of their keys; 0 for none.

    Args:
        words: those of its `HostLayout`.
    """
    dense_rows = int(words[DENSE_ROWS_AT])
    return MOST_BINS / dense_rows if dense_rows else 0.0


def bin_bits(segments: int) -> int:
    """Return the number of upper hash bits that choose the bin of a miss, in a lookup of `segments` segments."""
    return (MOST_BINS // segments).bit_length() - 1


def home_of(key: int, pairs: int, stretch: int = 1) -> int:
    """Return the home bucket of a key, as the kernels compute it.

    Args:
        stretch: of a near table, the number of devices that share the table beside it.
    """
    return ((_hash_of(key) >> 32) * stretch & 0xFFFFFFFF) * 2 * pairs >> 32


def other_bucket(key: int, pairs: int) -> int:
    """Return the bucket of a key of a static table beside its home, as the kernels compute it."""
    return (home_of(key, pairs) + 2 + 2 * ((_hash_of(key) & 0xFFFFFFFF) * (pairs - 1) >> 32)) % (2 * pairs)


def _hash_of(key: int) -> int:
    return int(hashes_of(np.array([key], np.int64))[0])


def sharing_word(stretch: int = 1, copies: int = 1, granules: int = 0) -> int:
    """Pack `Table.sharing` as `cuda/sharing.cuh` describes it."""
    return stretch | copies << 4 | granules << 8


def zero_pair(pairs: int) -> int:
    """Return the pair of key 0, which is the same for any stretch."""
    return home_of(0, pairs) // 2


def zero_filler(pairs: int, stretch: int = 1) -> int:
    """Return the filler of key 0's pair, which cannot be 0: the least positive key of another pair. Needs two pairs."""
    home = zero_pair(pairs)
    key = 1
    while home_of(key, pairs, stretch) // 2 == home:
        key += 1
    return key


def pairs_for(capacity_rows: int, static: bool = False) -> int:
    """Return the pairs of a table for `capacity_rows` rows: at least two, since a filler needs another pair."""
    if static:
        return static_sets(capacity_rows)
    return 0 if capacity_rows == 0 else max(2, -(-capacity_rows // (2 * SLOTS)))

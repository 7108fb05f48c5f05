"""The argument structs of the CUDA kernels, as laid out in `cuda/`, where static_asserts check their sizes.

Each is one table of names and types. Python packs by it, and the loop without the interpreter (`batch_loop.py`) takes its
offsets from it, so a field that moves in `cuda/` moves here once.
"""

import struct
from itertools import accumulate
from typing import Any, Self


class KernelStruct(struct.Struct):
    """A struct by its fields, `name:type` each, with types as the module `struct` names them. *Immutable.*

    Little-endian without implied padding; fields of padding are called `_`.

    Attributes:
        fields: as given, so that a struct can begin with another one's.
        names: of the fields, in order; repeated fields count once.
        offsets: in bytes, by name.
    """

    def __new__(cls, fields: str) -> Self:
        return super().__new__(cls, "<" + "".join(field.partition(":")[2] for field in fields.split()))  # type: ignore[call-arg]

    def __init__(self, fields: str) -> None:
        pairs = [field.split(":") for field in fields.split()]
        super().__init__("<" + "".join([kind for _, kind in pairs]))
        self.fields = fields
        self.names = tuple([name for name, _ in pairs if name != "_"])
        starts = accumulate([struct.calcsize("<" + kind) for _, kind in pairs], initial=0)
        self.offsets = {name: start for (name, _), start in zip(pairs, starts, strict=False) if name != "_"}

    def named(self, **values: Any) -> bytes:
        """Pack values by name; every field needs one. For structs without repeated fields.

        Raises:
            TypeError: names are missing or unknown.
        """
        if wrong := values.keys() ^ set(self.names):
            raise TypeError(f"packing arguments: {sorted(wrong)} are missing or unknown")
        return self.pack(*map(values.__getitem__, self.names))

    def at(self, *names: str, size_bytes: int = 8) -> int:
        """Return the offset of a store that writes these adjacent fields, the first from its lowest bits on, and no other.

        Raises:
            ValueError: a store of that size there is not aligned, or writes to other fields.
        """
        at = self.offsets[names[0]]
        stop = at + size_bytes
        filled = tuple([name for name, start in self.offsets.items() if at <= start < stop])
        if at % size_bytes or stop > self.size or filled != names:
            raise ValueError(f"a store of {size_bytes} bytes to {', '.join(names)}: got the fields {', '.join(filled)}")
        return at


TABLE = KernelStruct("buckets:Q rows:Q counters:Q zero_filler:q zero_pair:I pairs:I width:I sharing:I")
SEGMENT = KernelStruct("keys:Q out:Q found:Q buckets:Q rows:Q n:I pairs:I units:I first_block:I missing:I index:I")
QUERY_TAIL = KernelStruct(
    "missing_keys:Q missing_positions:Q missing_counts:Q any_missing:Q segment_count:I keys_per_warp:H unused:H"
)
QUERY_OF_ONE = KernelStruct(f"{SEGMENT.fields} {QUERY_TAIL.fields}")
HOST_LAYOUT = KernelStruct(
    "own:Q slabs:Q versions:Q slab_count:I slab_shift:I row_bytes:I segment_bits:I segments:32Q dense_rows:Q mirrored:Q "
    "mirrors:16Q records:Q starts:Q fingerprints:Q rows:Q rows_a_bucket:d number:Q buckets:I record_bytes:I "
    "known:Q"
)
MIRROR = KernelStruct("copies:Q n:Q")
LINK = KernelStruct("current:Q epoch:Q counters:4Q readers:Q")
READERS = KernelStruct("phase:Q running:2Q")
ANSWER_SEGMENT = KernelStruct(
    f"{TABLE.fields} layout:Q link:Q out:Q found:Q staged:Q missing:I index:I units:I staged_rows:I default_value:f "
    "authoritative:I bins_per_row:f _:4x"
)
ANSWER_TAIL = KernelStruct(
    "missing_keys:Q missing_positions:Q missing_counts:Q leaders:Q ranks:Q order:Q states:Q left_keys:Q left_positions:Q "
    "left_counts:Q slots:Q bins:Q leader_counts:Q tallies:Q progress:Q epochs:Q versions:Q versions_after:Q any_left:Q "
    "reports:Q done:Q number:Q bin_bits:I segment_count:I patience:I few:I fetch_warps:I settles:B defers:B slot_bits:B _:x"
)
POOL_SEGMENT = KernelStruct(
    "keys:Q offsets:Q weights:Q out:Q divisors:Q buckets:Q rows:Q padding_key:q unread:Q n:I bags:I pairs:I units:I "
    "out_units:I first_block:I missing:I index:I hotness:I bags_per_group:I max_norm:f options:I"
)
POOL_TAIL = KernelStruct(
    "missing_keys:Q missing_positions:Q places:Q entries:Q missing_counts:Q padding_counts:Q any_missing:Q wrong_offsets:Q "
    "segment_count:I _:4x"
)
INSERT_TAIL = KernelStruct("keys:Q vectors:Q chosen:Q n:I mode:I")  # after a TABLE
ERASE_TAIL = KernelStruct("keys:Q n:I _:4x")  # after a TABLE
DUMP_TAIL = KernelStruct("keys:Q count:Q first:I n:I")  # after a TABLE
SHARING = KernelStruct(
    "near_buckets:Q near_rows:Q samples:Q sample_count:Q near_pairs:I near_stretch:I first_pair:I pairs:I sample_room:I _:4x"
)
PROMOTE_TAIL = KernelStruct("own_buckets:Q samples:Q sample_count:Q staged:Q room:I _:4x")  # after two TABLEs
SCATTER = KernelStruct("positions:Q rows:Q fetched:Q vectors:Q out:Q found:Q n:I units:I default_value:f _:4x")
UNIQUE_HEAD = KernelStruct("missing_keys:Q missing_counts:Q rows:Q distinct:Q distinct_on_host:Q counts:Q")
UNIQUE_SEGMENT = KernelStruct("missing:I index:I")
RANK_SORTED = KernelStruct("keys:Q order:Q heads:Q rows:Q distinct:Q count:Q m:I _:4x")

// How a kernel reads a table of the host's memory in place, by the rules of hps/databases/hash_map/layout.py; pasted after
// embedding_cache.cuh. All of the table that it reads is pinned and mapped at the host's own addresses.
//
// WHY NO VECTOR IS TORN OR ANOTHER KEY'S. The host's one writer makes the version in a bucket's header odd before it changes
// keys, row numbers or a linked vector, and afterwards even, two more. A tile reads the bucket, then the row that it names,
// then the header and the entry again. It keeps the row only if the header is even and as it was, and the entry still names
// that key and row. A row's address depends on what was read of the bucket, and the second look's address on all that was
// read of the rows, so the loads cannot be exchanged; the acquire fence of system scope between them says so to the compiler
// and to PTX. All loads are relaxed ones of system scope, which no cache of the device answers.
//
// A key that is not in the bucket is absent, whatever else changes there: keys do not move between entries. A segment that was
// replaced by a larger one has headers of all ones. Its reader asks for the present layout; where that is the one that it has,
// the key is LEFT for the host, as is one whose bucket a writer keeps for too long.

#ifndef HPS_COPY
#define HPS_COPY 8  // lanes that move one row: 4, 8, 16 or 32
#endif

constexpr u32 MOST_SEGMENTS = 16;  // of a table
constexpr u32 HOST_BUCKET = 128;   // bytes: header; 10 keys, int64; 10 row numbers, uint32
constexpr u32 READ_AT_ONCE = 8;    // keys of a warp, each by a tile of 4 lanes

// Where a table lies (HostLayout in hps/host_tables.py), in device memory. Never changed once it is there.
struct HostLayout {
    const HostLayout* self;
    const u64* slabs;  // addresses, in device memory
    u32 slab_count;
    u32 slab_shift;  // a slab has 1 << slab_shift rows
    u32 row_bytes;
    u32 segment_bits;
    u64 segments[2 * MOST_SEGMENTS];  // of each the address and the number of buckets
};

// What lookups of one attached table share, in device memory.
struct Link {
    const HostLayout* current;  // for captured lookups; null: it cannot be read any more
    u64 epoch;                  // odd while the table is modified; two more after each modification
    u64 counters[4];            // of lookups that nobody waits for: keys missed, linked, absent, unread
};

// What became of a key.
constexpr u32 ABSENT = 0, FOUND = 1, LEFT = 2;

__device__ __forceinline__ uint4 load_host_part(u64 at) {
    uint4 v;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(at)
                 : "memory");
    return v;
}

__device__ __forceinline__ u64 load_host_word(u64 at) {
    u64 v;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(at) : "memory");
    return v;
}

__device__ __forceinline__ Unit load_host_unit(u64 at) {
    Unit v;
#if HPS_UNIT == 4
    asm volatile("ld.relaxed.sys.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.value[0]), "=f"(v.value[1]), "=f"(v.value[2]), "=f"(v.value[3])
                 : "l"(at)
                 : "memory");
#elif HPS_UNIT == 2
    asm volatile("ld.relaxed.sys.global.v2.f32 {%0, %1}, [%2];" : "=f"(v.value[0]), "=f"(v.value[1]) : "l"(at) : "memory");
#else
    asm volatile("ld.relaxed.sys.global.f32 %0, [%1];" : "=f"(v.value[0]) : "l"(at) : "memory");
#endif
    return v;
}

__device__ __forceinline__ u64 load_acquire(const u64* at) {
    u64 v;
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(at) : "memory");
    return v;
}

__device__ __forceinline__ void acquire_from_host() {
#if __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ >= 1208  // PTX 8.6
    asm volatile("fence.acquire.sys;" : : : "memory");
#else
    asm volatile("fence.acq_rel.sys;" : : : "memory");
#endif
}

// Read the rows of up to 8 keys, one a tile of 4 lanes; for whole warps.
//
// `where` holds the address of the layout, which is read anew at each attempt. `asks` tells the tiles that have a key.
// `store(tile, unit, value)` is called by the lane that read a unit of a tile's row, perhaps with values that are not kept:
// whoever stores them must not show them before this returns FOUND for the tile. `zero` is 0, which the compiler does not know.
template <typename Store>
__device__ __forceinline__ u32 read_host(const HostLayout* const* where, i64 key, bool asks, u32 units, u32 patience, u32 zero,
                                         Store store) {
    constexpr u32 ROWS_AT_ONCE = 32 / HPS_COPY, TURNS = READ_AT_ONCE / ROWS_AT_ONCE;
    const u32 lane = threadIdx.x % 32, tile = lane / 4, member = lane % 4;
    const u64 hashed = mix(key);
    u32 state = LEFT;
#pragma unroll 1
    for (u32 attempt = 0; attempt < patience && __any_sync(FULL_WARP, asks); ++attempt) {
        const HostLayout* const layout = reinterpret_cast<const HostLayout*>(load_word(where));
        if (layout == nullptr) break;
        const u32 segment = static_cast<u32>(hashed >> 32 >> (32 - layout->segment_bits));
        const u64 start = layout->segments[2 * segment], buckets = layout->segments[2 * segment + 1];
        const u64 home = start + ((hashed << layout->segment_bits >> 32) * buckets >> 32) * HOST_BUCKET;
        u64 bucket = home;
        bool probes = asks, names = false;
        u32 entry = 0, row = 0, low = 0, high = 0;
#pragma unroll 1
        while (__any_sync(FULL_WARP, probes)) {
            uint4 a = make_uint4(0, 0, 0, 0), b = a;
            if (probes) {
                a = load_host_part(bucket + 16 * member);
                b = load_host_part(bucket + 64 + 16 * member);
            }
            const u32 head_low = __shfl_sync(FULL_WARP, a.x, 4 * tile), head_high = __shfl_sync(FULL_WARP, a.y, 4 * tile);
            const u32 occupied = probes ? head_high & 0x3ff : 0;
            int at = -1;
            if (member != 0 && key_of(a.x, a.y) == key && occupied >> (2 * member - 1) & 1) at = 2 * member - 1;
            if (key_of(a.z, a.w) == key && occupied >> (2 * member) & 1) at = 2 * member;
            if (member < 2 && key_of(b.x, b.y) == key && occupied >> (7 + 2 * member) & 1) at = 7 + 2 * member;
            if (member == 0 && key_of(b.z, b.w) == key && occupied >> 8 & 1) at = 8;
            const u32 who = __ballot_sync(FULL_WARP, at >= 0) >> (4 * tile) & 15;
            at = __shfl_sync(FULL_WARP, at, 4 * tile + (who ? __ffs(who) - 1 : 0));
            const u32 word = (6 + at) & 3;  // row numbers begin 24 bytes after the upper half of the bucket
            const u32 mine = word == 0 ? b.x : word == 1 ? b.y : word == 2 ? b.z : b.w;
            const u32 number = __shfl_sync(FULL_WARP, mine, 4 * tile + (who ? (6 + at) >> 2 : 0));
            if (!probes) continue;
            if (head_low == 0xffffffffu && head_high == 0xffffffffu) {  // retired
                probes = false;
            } else if (who) {
                probes = false;
                names = (head_low & 1) == 0 && number >> layout->slab_shift < layout->slab_count;
                entry = at;
                row = number;
                low = head_low;
                high = head_high;
            } else {
                bucket += HOST_BUCKET;
                if (bucket == start + buckets * HOST_BUCKET) bucket = start;
                if (head_high >> 16 == 0 || bucket == home) {
                    state = ABSENT;
                    probes = asks = false;
                }
            }
        }
        u64 source = 0;
        if (names) {
            const u32 in_slab = row & ((1u << layout->slab_shift) - 1);
            source = layout->slabs[row >> layout->slab_shift] + static_cast<u64>(in_slab) * layout->row_bytes;
        }
        acquire_from_host();
        u32 copied = 0;
#pragma unroll 1
        for (u32 unit = lane % HPS_COPY; unit - lane % HPS_COPY < units; unit += HPS_COPY) {
            Unit value[TURNS];
            u64 from[TURNS];
#pragma unroll
            for (u32 t = 0; t < TURNS; ++t) {
                from[t] = __shfl_sync(FULL_WARP, source, (t * ROWS_AT_ONCE + lane / HPS_COPY) * 4);
                if (unit >= units) from[t] = 0;
                if (from[t]) value[t] = load_host_unit(from[t] + unit * sizeof(Unit));
            }
#pragma unroll
            for (u32 t = 0; t < TURNS; ++t) {
                if (from[t]) {
                    copied |= __float_as_uint(value[t].value[0]);
                    store(t * ROWS_AT_ONCE + lane / HPS_COPY, unit, value[t]);
                }
            }
        }
        const u32 late = __any_sync(FULL_WARP, copied & zero);  // 0, once all rows are here
        acquire_from_host();
        bool same = true;
        if (names && member < 3) {  // the header, the key, the row number
            const u32 word = member == 0 ? 0 : member == 1 ? 1 + entry : 11 + entry / 2;
            const u64 again = load_host_word(bucket + 8 * (word + late));
            same = member == 0   ? again == (static_cast<u64>(high) << 32 | low)
                   : member == 1 ? static_cast<i64>(again) == key
                                 : static_cast<u32>(again >> (32 * (entry & 1))) == row;
        }
        const u32 changed = __ballot_sync(FULL_WARP, !same) >> (4 * tile) & 15;
        if (names && !changed) {
            state = FOUND;
            asks = false;
        }
    }
    return state;
}

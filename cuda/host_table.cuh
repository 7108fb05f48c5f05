// How a kernel reads a table of the host's memory in place, by the rules of hps/stores/hash_map/layout.py; pasted after
// embedding_cache.cuh. All of the table that it reads is pinned and mapped at the host's own addresses.
//
// WHY NO VECTOR IS TORN OR ANOTHER KEY'S. The table's keys are divided into STRIPES by the upper bits of their hash. The host's one
// writer makes the version of a key's stripe odd before it changes an entry or a linked vector, and afterwards even, two more.
// A tile reads the version of its key's stripe, then the bucket, then the row that it names, then the version again. It keeps
// the row, or takes the key for absent, only if the version is even and as it was: then nothing of the stripe has changed in
// between, and whatever row the entry names is the key's. A row that was taken from an entry of another stripe meanwhile was
// no row of this key. The parts of a bucket may be of different moments, so that an occupancy bit may be seen before the key that
// it stands for; a free entry's key field holds 0, so that looks like key 0 and no other, and whatever links or unlinks a key
// where key 0 belongs changes the version of its stripe, too. The row's address depends on what was read of the bucket, and
// the second look's address on all that was read of the rows, so the loads cannot be exchanged; acquire fences of system scope
// say so to the compiler and to PTX. All loads are relaxed ones of system scope, which no cache of the device answers. Where
// many keys are missing, both looks are taken for all of them at once, before and after their rows are read (answer.cu).
// The first look need not be the reader's own. Whoever takes a second look leaves what it found in device memory (`known`), where
// the next reader finds it without a trip to the host, a fifth of the time of few misses. Versions never repeat, so a second look
// that equals one of any earlier time says as much as one of just before. One that differs is the first look of another attempt.
//
// WHY A MIRROR IS NEVER FOLLOWED WHEN IT IS OLD. The device may hold a copy of the buckets, so that a miss translates one address
// of the host's memory, not two. Beside it stands, for each stripe, the version that it was copied at, after the host's write and
// while no other one could begin. A tile that finds the stripe's present version there reads the copy, else the host's bucket. A
// copy is changed only after the version has become another one, so that the second look at the version refuses whatever was read
// of it meanwhile. A bucket may hold keys of two stripes: what concerns the one leaves the other's words as they are. Every layout
// has versions of its own, since the copy of a segment that was replaced is not kept current.
// A DENSE table's keys from 0 to dense_rows - 1 have the rows of their own numbers, for good. A version says by its upper bit
// whether any such key of the stripe is absent. If not, the key's row is read without its bucket, between the same two looks.
//
// A segment that was replaced by a larger one has headers of all ones. Its reader asks for the present layout; where that is the
// one that it has, the key is LEFT for the host, as is one whose stripe keeps changing.

#ifndef HPS_COPY
#define HPS_COPY 8  // lanes that move one row: 4, 8, 16 or 32
#endif
#ifndef HPS_PART_LANES
#define HPS_PART_LANES 32  // lanes that read one row by parts: 4, 8, 16 or 32
#endif
#ifndef HPS_LONG_PARTS
#define HPS_LONG_PARTS 1  // 0: no row takes more than HPS_PART_LANES parts, wherever it begins
#endif

constexpr u32 MOST_SEGMENTS = 16;  // of a table
constexpr u32 HOST_BUCKET = 128;   // bytes: header; 10 keys, int64; 10 row numbers, uint32
constexpr u32 READ_AT_ONCE = 8;    // keys of a warp: one for each tile of 4 lanes
constexpr u32 STRIPE_BITS = 10;    // of a hash, the upper ones
constexpr u32 VERSION_BYTES = 64;  // from one version to the next: reads of one line of the host's memory wait for each other

// A row file of a table (hps/stores/row_files/layout.py).
struct RowFile {
    u64 records;         // address, in host memory
    const u32* starts;   // of the buckets
    const u8* fingerprints;
    u64 rows;            // 0: there is no file
    double rows_a_bucket;
    u64 number;          // of the file with its map of changed rows, which no others of the table have
    u32 buckets;
    u32 record_bytes;
};

// Where a table lies (HostLayout in hps/host_tables.py), in device memory. Never changed once it is there.
struct HostLayout {
    const HostLayout* self;
    const u64* slabs;  // addresses, in device memory
    u64 versions;      // address of those of the stripes, uint64, each VERSION_BYTES after the last, in host memory
    u32 slab_count;
    u32 slab_shift;  // a slab has 1 << slab_shift rows
    u32 row_bytes;
    u32 segment_bits;
    u64 segments[2 * MOST_SEGMENTS];  // of each the address and the number of buckets
    u64 dense_rows;                   // keys below it have the row of their own number
    const u64* mirrored;              // the versions of the stripes that the mirror was copied at, in device memory; null without one
    u64 mirrors[MOST_SEGMENTS];       // of each segment the address of its copy, in device memory
    RowFile file;                     // row_file.cuh; of other tables all 0
    u64* known;                       // of each stripe a version that a reader has found; odd: none
};

// Counts the blocks that read layouts of a cache's row files, in device memory: those that began in an even and in an odd phase.
struct Readers {
    u64 phase;
    u64 running[2];
};

// What lookups of one attached table share, in device memory.
struct Link {
    const HostLayout* current;  // for captured lookups; null: it cannot be read any more
    u64 epoch;                  // odd while the table is modified; two more after each modification
    u64 counters[4];            // of lookups that nobody waits for: keys missed, linked, absent, unread
    Readers* readers;           // of row files
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

__device__ __forceinline__ u32 load_host_half(u64 at) {
    u32 v;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
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

// Whether a dense key may be absent, by the version of its stripe.
__device__ __forceinline__ bool has_holes(u64 version) { return version >> 63; }

// What 8 lanes found in a bucket, besides the row number.
constexpr u32 HIT = 1 << 8, RETIRED = 1 << 9, PASSED = 1 << 10;  // PASSED: some key has gone on to the next bucket

// Copy rows of float32 to rows of units, for `read_host`: `store(tile, unit, value)` is called by the lane that read a unit.
template <typename Store>
__device__ __forceinline__ u32 copy_units(u64 source, u32 units, Store store) {
    constexpr u32 ROWS_AT_ONCE = 32 / HPS_COPY, TURNS = READ_AT_ONCE / ROWS_AT_ONCE;
    const u32 lane = threadIdx.x % 32;
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
    return copied;
}

// Read rows of any format in parts of 16 bytes, wherever they begin, for `read_host`: every load is aligned, and a row costs as few
// as it can, since each costs the link a packet or two. A lane hands what belongs to the part before on to its neighbour.
// `store(tile, part, words, last)` gets the words of part after part of a row, and the row's last word. Up to 12 bytes before and
// behind a row are read, which are in its slab.
template <typename Store>
__device__ __forceinline__ u32 copy_parts(u64 source, u32 width, Store store) {
    constexpr u32 ROWS_AT_ONCE = 32 / HPS_PART_LANES, TURNS = READ_AT_ONCE / ROWS_AT_ONCE;
    constexpr u32 STEP = HPS_LONG_PARTS ? HPS_PART_LANES - 1 : HPS_PART_LANES;  // of a long row, the last lane only hands on
    const u32 lane = threadIdx.x % 32, member = lane % HPS_PART_LANES;
    u32 copied = 0;
#pragma unroll 1
    for (u32 first = 0; 4 * first < width; first += STEP) {
        const u32 part = first + member;
        uint4 data[TURNS];
        u64 from[TURNS];
        u32 last[TURNS];
#pragma unroll
        for (u32 t = 0; t < TURNS; ++t) {
            from[t] = __shfl_sync(FULL_WARP, source, (t * ROWS_AT_ONCE + lane / HPS_PART_LANES) * 4);
            data[t] = make_uint4(0, 0, 0, 0);
            const u32 skipped = static_cast<u32>(from[t]) / 4 % 4;
            if (from[t] && 4 * part < skipped + width) data[t] = load_host_part((from[t] & ~15ull) + 16 * part);
            last[t] = 0;
            if (HPS_LONG_PARTS && from[t]) last[t] = static_cast<u32>(load_host_half(from[t] + 4 * (width - 1)));
        }
#pragma unroll
        for (u32 t = 0; t < TURNS; ++t) {
            const uint4 d = data[t];
            copied |= d.x | (HPS_LONG_PARTS ? last[t] : 0);
            const u32 x = __shfl_down_sync(FULL_WARP, d.x, 1), y = __shfl_down_sync(FULL_WARP, d.y, 1),
                      z = __shfl_down_sync(FULL_WARP, d.z, 1), skipped = static_cast<u32>(from[t]) / 4 % 4;
            const uint4 words = skipped == 0   ? d
                                : skipped == 1 ? make_uint4(d.y, d.z, d.w, x)
                                : skipped == 2 ? make_uint4(d.z, d.w, x, y)
                                               : make_uint4(d.w, x, y, z);
            if (!HPS_LONG_PARTS) {
                const u32 within = (width - 1) % 4;
                const u32 own = within == 0 ? words.x : within == 1 ? words.y : within == 2 ? words.z : words.w;
                last[t] = __shfl_sync(FULL_WARP, own, lane - member + (width - 1) / 4);
            }
            if (from[t] && 4 * part < width && member < STEP) store(t * ROWS_AT_ONCE + lane / HPS_PART_LANES, part, words, last[t]);
        }
    }
    return copied;
}

// Where the map has the keys of the tiles.
struct Look {
    u64 source;  // address of the row, or 0
    bool absent;
    bool moved;  // it is to be read by the present layout
};

// The address of a row.
__device__ __forceinline__ u64 row_at(const HostLayout* layout, u32 row) {
    const u32 in_slab = row & ((1u << layout->slab_shift) - 1);
    return layout->slabs[row >> layout->slab_shift] + static_cast<u64>(in_slab) * layout->row_bytes;
}

// The address that the row of a dense key has, if the key is not absent; 0 for another key.
__device__ __forceinline__ u64 dense_row_at(const HostLayout* layout, i64 key, bool asks) {
    return asks && static_cast<u64>(key) < layout->dense_rows ? row_at(layout, static_cast<u32>(key)) : 0;
}

// Look up the keys of `asks` in the map; for whole warps. `version` is that of the key's stripe, `dense` what dense_row_at returned.
__device__ __forceinline__ Look look_up(const HostLayout* layout, i64 key, u64 dense, u64 hashed, u64 version, bool asks) {
    const u32 lane = threadIdx.x % 32, tile = lane / 4;
    const u32 part = lane % 8, group = lane / 8;  // 8 lanes read the whole bucket of a key, 16 bytes each
    const u32 segment = static_cast<u32>(hashed >> 32 >> (32 - layout->segment_bits));
    u64 start = layout->segments[2 * segment];
    const u64 buckets = layout->segments[2 * segment + 1];
    if (layout->mirrored != nullptr) {
        if (asks && load_word(layout->mirrored + (hashed >> (64 - STRIPE_BITS))) == version) start = layout->mirrors[segment];
        acquire_from_host();
    }
    const u64 home = start + ((hashed << layout->segment_bits >> 32) * buckets >> 32) * HOST_BUCKET;
    u64 bucket = home;
    bool probes = asks;
    Look look{0, false, false};
    if (asks && dense != 0 && !has_holes(version)) {
        probes = false;
        look.source = dense;
    }
#pragma unroll 1
    while (__any_sync(FULL_WARP, probes)) {
        uint4 data[2];
        u32 seen[2], number[2];
#pragma unroll
        for (u32 h = 0; h < 2; ++h) {  // keys 0 to 3, then 4 to 7
            const u64 from = __shfl_sync(FULL_WARP, probes ? bucket : 0, 4 * (4 * h + group));
            data[h] = make_uint4(0, 0, 0, 0);
            if (from) data[h] = load_host_part(from + 16 * part);
        }
#pragma unroll
        for (u32 h = 0; h < 2; ++h) {
            const uint4& d = data[h];
            const i64 sought = __shfl_sync(FULL_WARP, key, 4 * (4 * h + group));
            const u32 low = __shfl_sync(FULL_WARP, d.x, 8 * group), high = __shfl_sync(FULL_WARP, d.y, 8 * group);
            u32 entry = 16;
            if (part != 0 && part < 6 && key_of(d.x, d.y) == sought && high >> (2 * part - 1) & 1) entry = 2 * part - 1;
            if (part < 5 && key_of(d.z, d.w) == sought && high >> (2 * part) & 1) entry = 2 * part;
            const u32 who = __ballot_sync(FULL_WARP, entry < 16) >> (8 * group) & 0xff;
            entry = __shfl_sync(FULL_WARP, entry, 8 * group + (who ? __ffs(who) - 1 : 0));
            const u32 word = 22 + entry;  // row numbers begin 88 bytes after the bucket
            const u32 mine = (word & 3) == 0 ? d.x : (word & 3) == 1 ? d.y : (word & 3) == 2 ? d.z : d.w;
            number[h] = __shfl_sync(FULL_WARP, mine, 8 * group + (word >> 2 & 7));
            seen[h] = (who ? HIT : 0) | (high >> 16 ? PASSED : 0) | ((low & high) == 0xffffffffu ? RETIRED : 0);
        }
        const u32 holder = 8 * (tile % 4);  // who knows about the tile's key
        const u32 seen_low = __shfl_sync(FULL_WARP, seen[0], holder), seen_high = __shfl_sync(FULL_WARP, seen[1], holder);
        const u32 row_low = __shfl_sync(FULL_WARP, number[0], holder), row_high = __shfl_sync(FULL_WARP, number[1], holder);
        if (!probes) continue;
        const u32 here = tile < 4 ? seen_low : seen_high, row = tile < 4 ? row_low : row_high;
        if (here & (RETIRED | HIT)) {
            probes = false;
            look.moved = here & RETIRED || row >> layout->slab_shift >= layout->slab_count;
            if (!look.moved) look.source = row_at(layout, row);
        } else {
            bucket += HOST_BUCKET;
            if (bucket == start + buckets * HOST_BUCKET) bucket = start;
            if (!(here & PASSED) || bucket == home) {
                look.absent = true;
                probes = false;
            }
        }
    }
    return look;
}

// Take the first look at the version of the keys' stripes, where `version` is odd; the same for the lanes of a tile.
__device__ __forceinline__ u64 first_look(const HostLayout* layout, u64 version_at, u64 hashed, u64 version, bool asks, u32 attempt) {
    if (asks && version & 1 && attempt == 0) version = load_word(layout->known + (hashed >> (64 - STRIPE_BITS)));
    if (asks && version & 1) version = load_host_word(version_at);
    version = __shfl_sync(FULL_WARP, version, threadIdx.x % 32 / 4 * 4);
    acquire_from_host();
    return version;
}

// Take the second look, after all that was read with the first one, and leave it for later readers. `meanwhile` is called before
// it is here.
template <typename Meanwhile>
__device__ __forceinline__ u64 second_look(const HostLayout* layout, u64 version_at, u64 hashed, u64 version, bool asks,
                                           Meanwhile meanwhile) {
    u64* const known = layout->known + (hashed >> (64 - STRIPE_BITS));
    u64 before = version, again = version;
    if (asks) {
        before = load_word(known);
        again = load_host_word(version_at);
    }
    meanwhile();
    again = __shfl_sync(FULL_WARP, again, threadIdx.x % 32 / 4 * 4);
    if (asks && again != before && (again & 1) == 0 && threadIdx.x % 4 == 0) {
        asm volatile("st.release.gpu.global.u64 [%0], %1;" : : "l"(known), "l"(again) : "memory");
    }
    return again;
}

// Read the rows of up to 8 keys, one a tile of 4 lanes; for whole warps.
//
// `where` holds the address of the layout, which is read anew at each attempt; `early` is what it held earlier, or null. `asks`
// tells the tiles that have a key. `version` is that of the key's stripe as it was read earlier, or odd where it is yet to be
// looked at. `copy(source)` reads the rows at the tiles' addresses, none where that is 0, and returns some bits of all that was
// read. It may be called again, and what it read may not be kept: whoever stores it must not show it before this returns FOUND
// for the tile. `zero` is 0, which the compiler does not know. `meanwhile(found)` is called while the second look is on its
// way, again with each attempt: `found` tells the tiles that have a row, if the look agrees. Without LOOKS, the host's versions
// are neither read nor compared: what this returns is a guess, until the caller has compared them with `version`.
template <bool LOOKS, typename Copy, typename Meanwhile>
__device__ __forceinline__ u32 read_host(const HostLayout* const* where, const HostLayout* early, i64 key, bool asks, u64 version,
                                         u32 patience, u32 zero, Copy copy, Meanwhile meanwhile) {
    const u64 hashed = mix(key);
    u32 state = LEFT;
#pragma unroll 1
    for (u32 attempt = 0; attempt < patience && __any_sync(FULL_WARP, asks); ++attempt) {
        const HostLayout* const layout = early != nullptr ? early : reinterpret_cast<const HostLayout*>(load_word(where));
        early = nullptr;
        if (layout == nullptr) break;
        const u64 version_at = layout->versions + VERSION_BYTES * (hashed >> (64 - STRIPE_BITS));
        const u64 dense = dense_row_at(layout, key, asks);  // before the look, which it does not need
        if (LOOKS) version = first_look(layout, version_at, hashed, version, asks, attempt);
        const Look look = look_up(layout, key, dense, hashed, version, asks);
        const u64 source = look.source;
        const bool absent = look.absent, moved = look.moved;
        acquire_from_host();
        const u32 copied = copy(source);
        if (!LOOKS) {
            if (asks && (source != 0 || absent)) state = absent ? ABSENT : FOUND;
            break;
        }
        const u32 late = __any_sync(FULL_WARP, copied & zero);  // 0, once all rows are here
        acquire_from_host();
        const u64 again = second_look(layout, version_at + late, hashed, version, asks, [&] { meanwhile(source != 0); });
        if (asks && again == version && (version & 1) == 0 && (source != 0 || absent)) {
            state = absent ? ABSENT : FOUND;
            asks = false;
        }
        if (asks && moved && again == version && load_word(where) == reinterpret_cast<u64>(layout)) asks = false;
        version = again;
    }
    return state;
}

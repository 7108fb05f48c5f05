// PURPOSE     Copies the resident vectors of a request's keys to their rows of the outputs, for all its tables at once, and
//             lists the keys that are not resident.
// ARRAYS      For each segment: keys (n,) int64, in, 8-byte aligned. out (n, dim) of format HPS_OUT, out, aligned to HPS_UNIT
//             elements; rows that missed are left as they were or hold anything. found (n,) uint8 or null, out: 1 for hits, 0 for
//             misses. buckets and rows of its table, in; scores of the buckets, in/out (embedding_cache.cuh).
//             missing_keys int64 and missing_positions uint32, out: from the segment's `missing` on, one entry a miss, in
//             any order. missing_counts (segments,) uint32, in/out: must be 0 before, the number of misses after.
//             any_missing uint32 in mapped host memory, out: becomes 1 if a key of any segment misses, else is left alone.
//             With HPS_SETTLES, of complete static tables, misses get the default value, whose bits `missing` is, and no list:
//             missing_counts and any_missing report them, and any_missing[1] becomes 1 if a key could not be read, whose
//             row is then left alone; where any_missing is null, both are added to the table's counters
//             (static_tables.cuh), and both get the default value.
// LAUNCH      Blocks of HPS_THREADS; a segment has ceil(n / (HPS_THREADS / 32 * keys_per_warp)) of them, from its first_block
//             on. A warp owns keys_per_warp keys (8, 16 or 32) and answers its distinct ones, or with HPS_FEW all, in passes of 8:
//             a tile of 4 lanes reads the bucket of each, HPS_COPY lanes move its row. n = 0 is a segment without a block; lanes
//             past a ragged end have no key.
// INVARIANTS  Every int64 is a key. Duplicates are allowed. Nothing is locked; a table of 0 pairs misses all.
// RACES       Inserts, updates and erases may run meanwhile: a row is kept only if its bucket's version and the slot's key are
//             the same after the copy (embedding_cache.cuh), else the key is queried again, HPS_PATIENCE times, then it counts as
//             a miss, which is always a right answer; with HPS_SETTLES it is one that could not be read. The second look comes
//             after the copy because an acquire fence stands between the two, and because its address depends on all that the
//             warp's lanes have copied. A miss needs no second look, since keys do not move between slots; but those of
//             static tables do, and static_tables.cuh tells how a query notices.
//             Scores are raised with an OR that nothing waits for, and only while they are low; one that meets a writer may be
//             lost, which costs nothing but recency. One atomic add a warp, and only of a warp that misses, reserves places in
//             the list; the warp that reserved the first sets any_missing.
//             Before a row that exists below leaves a complete table, the table's complete word is cleared; a query reads the
//             word after the buckets in which it found no key.
//             Of a shared table, rows of the device's near table come before it, and samples of keys found at neighbours are listed
//             for promote.cu (sharing.cuh); samples that are written while that reads may be lost.
// TWIN        hps.cache.cpu.kernels.query

#include "embedding_cache.cuh"
#include "rows.cuh"
#include "sharing.cuh"
#include "static_tables.cuh"

#ifndef HPS_SETTLES
#define HPS_SETTLES 0  // 1: the tables are static and complete, so a key that misses is absent
#endif
#ifndef HPS_THREADS
#define HPS_THREADS 128
#endif
// A query waits for memory, and keys in flight hide that: on an H200, 32 registers a thread (16 blocks of 128 an SM) were
// 5 % faster than 40 without spills. Without gain: reading the bucket of the next pass ahead, prefetching buckets into L2,
// cache policies for buckets or rows, two keys a tile, 32 keys a warp.
#ifndef HPS_MIN_BLOCKS
#define HPS_MIN_BLOCKS 1  // of an SM: bounds the registers
#endif
#ifndef HPS_COPY
#define HPS_COPY 8  // lanes that move one row: 4, 8, 16 or 32
#endif
#ifndef HPS_ROW_LOADS
#define HPS_ROW_LOADS 2  // rows that each lane has in flight
#endif
#ifndef HPS_LONG_ROWS
#define HPS_LONG_ROWS 0  // 1: rows may have more than HPS_COPY units
#endif
#ifndef HPS_SEGMENTS
#define HPS_SEGMENTS 32  // segments of one launch, at most
#endif
// A launch of few keys takes as long as its slowest warp. So a warp compares no keys, has the rows of a pass in flight at once,
// and of static tables, where every second warp has a key that is not at home, reads the other buckets beside the homes. On
// H200s, 8,192 keys of dim 128 reach 0.83 of a plain gather instead of 0.75, of dim 32 0.57 instead of 0.53; with half of the
// rows on another H200 0.89 instead of 0.73, and 0.76 instead of 0.69.
#ifndef HPS_FEW
#define HPS_FEW 0  // 1: keys_per_warp is at most 8
#endif
// 1: the key is read again beside its row, before the version, so that no change of the slot between the two reads can pass for
// none. 0: by one load with the version, where keys are popular a sixth faster, since a third of the requests to their buckets is
// saved. That load reads one bucket of 64 bytes, which the hardware reads at once, and a writer that came between its lanes would
// take two trips to memory to own the bucket first.
#ifndef HPS_KEY_FIRST
#define HPS_KEY_FIRST (HPS_FEW || HPS_FORMAL_ORDER)
#endif
#ifndef HPS_PATIENCE
#define HPS_PATIENCE 1024
#endif

struct Segment {
    const i64* keys;
    OutUnit* out;
    u8* found;
    uint4* buckets;
    const u8* rows;
    u32 n;
    u32 pairs;
    u32 units;  // of a vector: dim / HPS_UNIT; above FORMAT_SHIFT the format of the rows
    u32 first_block;
    u32 missing;  // with HPS_SETTLES: the bits of the default value
    u32 index;    // of its count
};

struct Query {
    Segment segments[HPS_SEGMENTS];
    i64* missing_keys;
    u32* missing_positions;
    u32* missing_counts;
    u32* any_missing;
    u32 segment_count;
    u16 keys_per_warp;
    u16 zero;  // always 0, which the compiler does not know
};

static_assert(sizeof(Segment) == 64, "hps/cache/cuda/kernels.py packs this");
static_assert(sizeof(Query) == sizeof(Segment) * HPS_SEGMENTS + 40, "hps/cache/cuda/kernels.py packs this");

constexpr u32 WARPS = HPS_THREADS / 32;
constexpr u32 PASS = 8;              // keys of a pass
constexpr u32 ROWS = 32 / HPS_COPY;  // rows that a warp moves at once
constexpr u32 ROUNDS = PASS / ROWS;  // until it has moved those of a pass
constexpr u32 ROW_LOADS = HPS_ROW_LOADS;
constexpr u32 NO_ROW = 0xffffffffu;
static_assert(ROUNDS % ROW_LOADS == 0, "whole batches");

// Where a tile's key stands in the bucket that it holds: the slot, or -1; for whole warps.
__device__ __forceinline__ int tile_slot(const uint4& part, i64 key, bool asked, u32 tile, u32 member) {
#if HPS_STATIC
    const u32 occupied = occupied_of(__shfl_sync(FULL_WARP, part.x, 4 * tile));
    const int in_part = asked ? slot_in_static_part(part, member, key, occupied) : -1;
#else
    const int in_part = asked ? slot_in_part(part, member, key) : -1;
#endif
    const u32 who = __ballot_sync(FULL_WARP, in_part >= 0) >> (4 * tile) & 15;
    const int slot = __shfl_sync(FULL_WARP, in_part, 4 * tile + (who ? __ffs(who) - 1 : 0));
    return who ? slot : -1;
}

#if HPS_FEW
// An array of a value for each key of the warp, of which a lane has its tile's alone.
template <typename T>
struct OfTile {
    T value;
    __device__ __forceinline__ T operator[](u32) const { return value; }
};

// An array of the lanes that query each key.
struct Askers {
    u32 first;
    __device__ __forceinline__ u32 operator[](u32 place) const { return 1u << (first + place); }
    __device__ __forceinline__ Askers operator+(u32 places) const { return Askers{first + places}; }
};
#else
using Askers = const volatile u32*;

// Write the distinct keys of a warp, their homes, of static tables their other buckets, and the lanes that query them; returns
// the number of keys to find.
__device__ __forceinline__ u32 find_distinct(const Segment& segment, i64 key, u32 all, u32 lane, i64* keys, u32* homes, u32* others,
                                             u32* askers) {
    u32 distinct = 0;
    if (all >> lane & 1) {
        const u32 same = __match_any_sync(all, static_cast<u64>(key)), earlier = (1u << lane) - 1;
        const u32 leaders = __ballot_sync(all, (same & earlier) == 0);
        distinct = __popc(leaders);
        if ((same & earlier) == 0) {
            const u32 place = __popc(leaders & earlier);
            keys[place] = key;
            homes[place] = home_of(key, segment.pairs);
            if (HPS_STATIC) others[place] = other_bucket(homes[place], key, segment.pairs);
            askers[place] = same;
        }
    }
    distinct = __shfl_sync(FULL_WARP, distinct, 0);
    __syncwarp();
    return distinct;
}
#endif

#if !HPS_SETTLES
__device__ __forceinline__ void list_misses(const Query& request, const Segment& segment, u32 first, u32 missed, u32 lane) {
    u32 to = 0;
    if (lane == 0) {
        to = atomicAdd(request.missing_counts + segment.index, __popc(missed));
        if (to == 0) *request.any_missing = 1;
    }
    to = segment.missing + __shfl_sync(FULL_WARP, to, 0) + __popc(missed & ((1u << lane) - 1));
    if (missed >> lane & 1) {
        request.missing_keys[to] = __ldg(segment.keys + first + lane);
        request.missing_positions[to] = first + lane;
    }
}
#endif

#if HPS_SETTLES
// Finish keys that are not resident: those that could not be read, and the others, which are absent while the table is complete.
// The table's complete word is read after their buckets: it is cleared before a row that exists becomes non-resident.
__device__ __forceinline__ void settle_misses(const Query& request, const Segment& segment, u32 first, u32 missed, u32 unread,
                                              u32 lane) {
    const u32 units = units_of(segment.units);
    const u64 row_bytes = static_cast<u64>(segment.pairs) * (2 * SLOTS) * 4 * width_of(format_of(segment.units), units * UNIT);
    u64* const counters = reinterpret_cast<u64*>(reinterpret_cast<u64>(segment.rows) + (row_bytes + 255) / 256 * 256);
    const bool complete = load_word(counters + COMPLETE) != 0, waits = request.any_missing != nullptr;
    if (!complete) unread = missed;
    const u32 absent = missed & ~unread;
    Unit value;
#pragma unroll
    for (u32 u = 0; u < UNIT; ++u) value.value[u] = __uint_as_float(segment.missing);
    for (u32 to = waits ? absent : missed; to; to &= to - 1) {
        OutUnit* const row = segment.out + static_cast<u64>(first + __ffs(to) - 1) * units;
        for (u32 unit = lane; unit < units; unit += 32) stream_out(row + unit, narrowed(value));
    }
    if (lane != 0) return;
    if (waits) {  // flags in mapped memory: whether any key missed, and whether any could not be read
        if (atomicAdd(request.missing_counts + segment.index, __popc(absent)) == 0) request.any_missing[0] = 1;
        if (unread) request.any_missing[1] = 1;
    } else {
        if (absent) add_to(counters + ABSENT_KEYS, static_cast<u64>(__popc(absent)));
        if (unread) add_to(counters + UNREAD_KEYS, static_cast<u64>(__popc(unread)));
    }
}
#endif

__device__ __forceinline__ const u8* row_at(const Segment& segment, const volatile Near& near, u32 row, u64 row_bytes) {
    if (HPS_NEAR && row & NEAR_ROW) return near.rows + (row & ~NEAR_ROW) * row_bytes;
    return segment.rows + row * row_bytes;
}

#if HPS_NEAR
// What a tile found in the near table.
struct NearLook {
    u32 index, word, scores;
    int slot;
};

// Look for the tiles' keys in the near table; for whole warps.
__device__ __forceinline__ NearLook look_near(const volatile Near& near, i64 key, bool asks, u32 tile, u32 member) {
    const uint4* const buckets = near.buckets;
    NearLook look{asks ? near_home_of(near, key) : 0, 0, 0, -1};
    bool looks = asks;
#pragma unroll 1
    for (u32 bucket = 0; bucket < 2 && __any_sync(FULL_WARP, looks); ++bucket) {  // at home, then next door
        uint4 part = make_uint4(0, 0, 0, 0);
        if (looks) part = load_part(buckets + static_cast<u64>(look.index) * BUCKET_PARTS + member);
        const int in_part = looks ? slot_in_part(part, member, key) : -1;
        const u32 who = __ballot_sync(FULL_WARP, in_part >= 0) >> (4 * tile) & 15;
        const int slot = __shfl_sync(FULL_WARP, in_part, 4 * tile + (who ? __ffs(who) - 1 : 0));
        const u32 word = __shfl_sync(FULL_WARP, part.x, 4 * tile);
        if (looks) {
            look.slot = who ? slot : -1;
            look.word = word;
            look.scores = part.y;
            looks = !who && word >> 24;
            if (looks) look.index ^= 1;
        }
    }
    return look;
}
#endif

// Copy the rows of a pass to the lanes that query them; for whole warps. Lane l moves unit l % HPS_COPY of row l / HPS_COPY of a
// round. `row` is that of the tile's key. Returns some bits of every unit that was copied.
template <u32 FORMAT>
__device__ __forceinline__ u32 copy_rows(const Segment& segment, const volatile Near& near, u32 first, u32 row,
                                         Askers askers, u32 answered) {
    if constexpr (!OCCURS<FORMAT>) return 0;
    const u32 lane = threadIdx.x % 32, units = units_of(segment.units), dim = units * UNIT;
    const u64 row_bytes = 4 * width_of(FORMAT, dim);
    u32 copied = 0;
#pragma unroll 1
    for (u32 unit = lane % HPS_COPY; unit - lane % HPS_COPY < units; unit += HPS_COPY) {
#pragma unroll
        for (u32 batch = 0; batch < ROUNDS; batch += ROW_LOADS) {
            Stored<FORMAT, SharedMemory> value[ROW_LOADS];
            u32 from[ROW_LOADS];
#pragma unroll
            for (u32 r = 0; r < ROW_LOADS; ++r) {
                from[r] = __shfl_sync(FULL_WARP, row, ((batch + r) * ROWS + lane / HPS_COPY) * 4);
                if (unit >= units) from[r] = NO_ROW;
                if (from[r] != NO_ROW) value[r].load(row_at(segment, near, from[r], row_bytes), unit, dim);
            }
#pragma unroll
            for (u32 r = 0; r < ROW_LOADS; ++r) {
                if (from[r] != NO_ROW) {
                    copied |= value[r].bits();
                    const OutUnit out = narrowed(value[r].widened());
                    u32 to = askers[(batch + r) * ROWS + lane / HPS_COPY] & ~answered;
                    do {
                        stream_out(segment.out + static_cast<u64>(first + __ffs(to) - 1) * units + unit, out);
                        to &= to - 1;
                    } while (to);
                }
            }
        }
        if (!HPS_LONG_ROWS) break;
    }
    return copied;
}

extern "C" __global__ void __launch_bounds__(HPS_THREADS, HPS_MIN_BLOCKS) query(const __grid_constant__ Query request) {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" : : : "memory");  // answer.cu waits for the end itself
#endif
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, tile = lane / 4, member = lane % 4;
    u32 s = 0;
#pragma unroll
    for (u32 step = HPS_SEGMENTS / 2; step > 0; step /= 2) {
        if (s + step < request.segment_count && request.segments[s + step].first_block <= blockIdx.x) s += step;
    }
    const Segment& segment = request.segments[s];
    const u32 first = ((blockIdx.x - segment.first_block) * WARPS + warp) * request.keys_per_warp;
    if (first >= segment.n) return;
    const u32 count = min(segment.n - first, static_cast<u32>(request.keys_per_warp)), units = units_of(segment.units);

    const u32 all = __ballot_sync(FULL_WARP, lane < count);
    const u32 own = HPS_FEW ? tile : lane;
    const i64 key = own < count ? __ldcs(segment.keys + first + own) : 0;
    __shared__ Near near_of[HPS_NEAR ? WARPS : 1];
    const volatile Near& near_table = near_of[HPS_NEAR ? warp : 0];
#if HPS_NEAR
    if (segment.pairs != 0 && lane == 0) near_of[warp] = near_of_copy(segment.buckets);  // while the keys are on their way
#endif
#if HPS_FEW
    const u32 distinct = segment.pairs == 0 ? 0 : count;
    const OfTile<i64> key_at_place{key};
    const OfTile<u32> home_at_place{home_of(key, segment.pairs)};
#if HPS_STATIC
    const OfTile<u32> other_at_place{other_bucket(home_at_place[0], key, segment.pairs)};
#endif
    const Askers askers_at_place{0};
#if HPS_NEAR
    __syncwarp();
#endif
#else
    __shared__ i64 keys_of[WARPS][32];  // of each warp: its distinct keys, their homes, the lanes that asked for them
    __shared__ u32 homes_of[WARPS][32], askers_of[WARPS][32], others_of[HPS_STATIC ? WARPS : 1][32];
    const u32 found = find_distinct(segment, key, all, lane, keys_of[warp], homes_of[warp],
                                    others_of[HPS_STATIC ? warp : 0], askers_of[warp]);
    const u32 distinct = segment.pairs == 0 ? 0 : found;

    // What the passes need of it is read again rather than kept: registers bound the keys in flight.
    const volatile i64* const key_at_place = keys_of[warp] + tile;
    const volatile u32* const home_at_place = homes_of[warp] + tile;
#if HPS_STATIC
    const volatile u32* const other_at_place = others_of[warp] + tile;
#endif
    const Askers askers_at_place = askers_of[warp];
#endif

    u32 answered = 0;  // bit i: key i of the warp
#if HPS_SETTLES
    u32 unread = 0;  // likewise: a writer kept its bucket
#endif
#if HPS_NEAR
    const bool notes = distinct && near_table.pairs && is_sampled(warp);
#endif
    u32 attempt = 0;
#pragma unroll 1
    for (u32 done = 0; done < distinct;) {
        bool asks = done + tile < distinct && askers_at_place[done + tile] & ~answered;
        u32 index = asks ? home_at_place[done] : 0;
        uint4 part;
        if (asks) part = load_part(segment.buckets + static_cast<u64>(index) * BUCKET_PARTS + member);
#if HPS_STATIC && HPS_FEW
        const u32 beside = asks ? other_at_place[done] : 0;
        uint4 other_part;
        if (asks) other_part = load_part(segment.buckets + static_cast<u64>(beside) * BUCKET_PARTS + member);
#endif
#if HPS_NEAR
        NearLook near{0, 0, 0, -1};  // while the bucket is on its way
        const bool looks_near = asks && near_table.may_have(index / 2);
        if (__any_sync(FULL_WARP, looks_near)) near = look_near(near_table, key_at_place[done], looks_near, tile, member);
        asks = asks && near.slot < 0;
        const bool is_near = near.slot >= 0;
#else
        constexpr bool is_near = false;
#endif
        int slot = tile_slot(part, key_at_place[done], asks, tile, member);
        u32 word = __shfl_sync(FULL_WARP, part.x, 4 * tile);  // the first of the bucket's header
        bool moved = false;
#if HPS_STATIC
        if (__any_sync(FULL_WARP, asks && slot < 0)) {  // a key is not at home
            const u32 home_word = word;
            const bool strayed = asks && slot < 0 && strays_of(word);
            if (strayed) {
#if HPS_FEW
                index = beside;
                part = other_part;
#else
                index = other_at_place[done];
                part = load_part(segment.buckets + static_cast<u64>(index) * BUCKET_PARTS + member);
#endif
            }
            int there = tile_slot(part, key_at_place[done], strayed, tile, member);
            u32 header = __shfl_sync(FULL_WARP, part.x, 4 * tile);
            bool missing = asks && slot < 0 && there < 0;
            if (__any_sync(FULL_WARP, missing)) {  // it may have moved meanwhile: look again, in the order of static_tables.cuh
                const bool again = missing && strayed;
                acquire();
                if (again) part = load_part(segment.buckets + static_cast<u64>(index) * BUCKET_PARTS + member);
                const int other_slot = tile_slot(part, key_at_place[done], again, tile, member);
                const u32 other_header = __shfl_sync(FULL_WARP, part.x, 4 * tile);
                if (again) {
                    there = other_slot;
                    header = other_header;
                    missing = there < 0;
                }
                acquire();
                const uint4* const home = segment.buckets + static_cast<u64>(home_at_place[done]) * BUCKET_PARTS;
                if (missing) part = load_part(home + member);
                const int at_home = tile_slot(part, key_at_place[done], missing, tile, member);
                acquire();
                if (missing && member == 0) moved = at_home >= 0 || has_changed(home, home_word);
            }
            if (strayed) {
                slot = there;
                word = header;
            }
        }
#else
        const bool strayed = asks && slot < 0 && strays_of(word);
        if (__any_sync(FULL_WARP, strayed)) {  // a key is not at home, and some key has strayed: look at the neighbour
            if (strayed) {
                index ^= 1;
                part = load_part(segment.buckets + static_cast<u64>(index) * BUCKET_PARTS + member);
            }
            const int there = tile_slot(part, key_at_place[done], strayed, tile, member);
            const u32 header = __shfl_sync(FULL_WARP, part.x, 4 * tile);
            if (strayed) {
                slot = there;
                word = header;
            }
        }
#endif
#if HPS_NEAR
        uint4* buckets = segment.buckets;
        if (is_near) {
            buckets = near_table.buckets;
            index = near.index;
            slot = near.slot;
            word = near.word;
            part.y = near.scores;
        }
#else
        uint4* const buckets = segment.buckets;
#endif
        acquire();
        const bool owned = word & 1;  // by a writer
        const bool copies = slot >= 0 && !owned;
        bool retry = moved || (slot >= 0 && owned);
#if !HPS_STATIC
        // Writing on every hit costs a quarter of the throughput (0.58 of the gather for 0.79). A plain store of the byte lost
        // one of two neighbours that were always requested together, which was then evicted: hence the OR.
        if (copies && member == 0 && score_of(part.y, slot) < ENOUGH_SCORE) {
            const u32 raised = score_of(part.y, slot) < HIT_SCORE ? HIT_SCORE : TOP_SCORE;
            fetch_or(scores_at(buckets + static_cast<u64>(index) * BUCKET_PARTS), raised << (4 * slot));
        }
#endif

#if HPS_NEAR
        if (notes) {
            const Sharing& sharing = sharing_of(segment.buckets);
            const bool neighbour = copies && !is_near && near_table.may_have(index / 2);
            note_samples(sharing, key_at_place[done], neighbour && member == 0, lane);
        }
#endif
        const u32 row = copies ? (index * SLOTS + slot) | (is_near ? NEAR_ROW : 0) : NO_ROW;
#if HPS_KEY_FIRST
        const u64* const header = reinterpret_cast<const u64*>(buckets + static_cast<u64>(index) * BUCKET_PARTS);
        const i64 key_again = copies && member == 1 ? static_cast<i64>(load_word(header + 1 + slot)) : 0;
#endif
        u32 copied = 0;
        switch (format_of(segment.units)) {
            case FLOAT32: copied = copy_rows<FLOAT32>(segment, near_table, first, row, askers_at_place + done, answered); break;
            case FLOAT16: copied = copy_rows<FLOAT16>(segment, near_table, first, row, askers_at_place + done, answered); break;
            case BFLOAT16: copied = copy_rows<BFLOAT16>(segment, near_table, first, row, askers_at_place + done, answered); break;
            case INT8: copied = copy_rows<INT8>(segment, near_table, first, row, askers_at_place + done, answered); break;
        }
#if HPS_KEY_FIRST
        copied |= static_cast<u32>(key_again);
#endif
        const u32 late = __any_sync(FULL_WARP, copied & request.zero);  // 0, once all rows and keys are here
        acquire();

        bool same = true;
#if HPS_KEY_FIRST
        if (copies && member == 0) same = ((load_word(header + late) ^ word) & 0xffff) == 0;
        if (copies && member == 1) same = key_again == key_at_place[done];
#else
        if (copies && member < 2) {  // member 0 reads the version again, member 1 the key
            const u32 word_of = member == 0 ? 0 : 1 + slot;
            const u64 again =
                load_word(reinterpret_cast<const u64*>(buckets + static_cast<u64>(index) * BUCKET_PARTS) + word_of + late);
            same = member == 0 ? ((again ^ word) & 0xffff) == 0 : static_cast<i64>(again) == key_at_place[done];
        }
#endif
        const bool torn = __ballot_sync(FULL_WARP, !same) >> (4 * tile) & 15;
        answered |= __reduce_or_sync(FULL_WARP, copies && !torn ? askers_at_place[done + tile] : 0);
        retry |= torn;
        if (__any_sync(FULL_WARP, retry) && ++attempt < HPS_PATIENCE) continue;  // those that are answered are left out
#if HPS_SETTLES
        unread |= __reduce_or_sync(FULL_WARP, retry ? askers_at_place[done + tile] & ~answered : 0);
#endif
        attempt = 0;
        done += PASS;
    }

    u32 missed = all & ~answered;
    if (segment.found != nullptr && lane < count) segment.found[first + lane] = answered >> lane & 1;
#if HPS_SETTLES
    if (missed) settle_misses(request, segment, first, missed, unread & missed, lane);
#else
    if (missed) list_misses(request, segment, first, missed, lane);
#endif
}

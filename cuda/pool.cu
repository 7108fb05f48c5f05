// PURPOSE     Adds up the resident vectors of the keys of each bag, for all tables of a request at once, and lists the keys that
//             are not resident (pool); later adds the vectors of those, which were found elsewhere (number, pool_rest).
// ARRAYS      For each segment: keys (n,) int64, in, 8-byte aligned. offsets (bags,) or (bags + 1,) int64 or int32, in: where
//             bags begin; or null: each has `hotness` keys. weights (n,) float32 or null, in. out (bags, dim) float32, out, rows
//             out_units units apart, aligned to HPS_UNIT floats. divisors (bags,) float32, out: of bags that lack vectors. buckets
//             and rows of its table, in; scores of the buckets, in/out (embedding_cache.cuh). missing_keys int64, missing_positions
//             and places uint32, out: from the segment's `missing` on, one entry a miss, in any order: its key, its number among them
//             and its position among the keys. missing_counts (segments,) uint32, in/out: must be 0 before, the number of misses
//             after. padding_counts, likewise, of keys that were left out. any_missing and wrong_offsets uint32 in mapped host
//             memory, out: become 1 if a key of any segment misses, or if offsets do not begin with 0, fall, or miss the end;
//             where `unread` uint64 is given, that is counted there instead.
//             number: entries (keys,) uint32, in/out: must be 0xffffffff before; of each key that missed, the number of its miss.
//             pool_rest: rows (misses, dim) float32, in: their vectors.
// LAUNCH      Blocks of HPS_THREADS. In pool and pool_rest a segment has ceil(bags / (groups of a block * bags_per_group)) of them,
//             from its first_block on. A group of HPS_COPY lanes owns bags_per_group bags, at most 32, and takes the keys of all of
//             them, a key a lane: tiles of 4 lanes find them, then the group reads HPS_KEYS rows at once, HPS_CHUNKS units of each a
//             lane. number: any multiple of the segments. No bags is a segment without a block.
// INVARIANTS  Every int64 is a key. A bag's vector is the sum of w_i v_i, divided as the combiner says; hps/tensors/bags.py says how.
//             Resident keys are added in their order, then the others in theirs. out of a bag that lacks vectors is the sum
//             without its division, until pool_rest. A maximum starts from -inf; its divisor is 0 without keys, 1 if its first
//             vector was found, -1 if not. A wrong offset reads and writes nothing outside of the arrays.
// RACES       As in query.cu, also of static tables: a row counts only if its bucket's version and the slot's key are the same after it was read. That is
//             seen once for all keys of a warp, when their rows have been added; if one is not, all are added again, to what was
//             there before, and bags that were written are written again. After HPS_PATIENCE times the key counts as a miss.
// TWIN        hps.cache.cpu.pooling.pool, hps.tensors.pooling.pool_rows

#include "embedding_cache.cuh"
#include "rows.cuh"
#include "sharing.cuh"
#include "static_tables.cuh"

#ifndef HPS_THREADS
#define HPS_THREADS 128
#endif
// Spilled registers would be read from L2, since the acquire fence between two looks at a bucket invalidates L1: on an H200, 96
// registers without spills beat 80 with 60 bytes of them (158 us against 180).
#ifndef HPS_MIN_BLOCKS
#define HPS_MIN_BLOCKS 1
#endif
#ifndef HPS_COPY
#define HPS_COPY 32
#endif
#ifndef HPS_CHUNKS
#define HPS_CHUNKS 1  // units of a row that one lane holds
#endif
#ifndef HPS_PLAIN
#define HPS_PLAIN 0  // 1: no segment has weights or a max_norm
#endif
#ifndef HPS_MAXIMA
#define HPS_MAXIMA 0  // 1: some segments may be maxima
#endif
#ifndef HPS_KEYS
#define HPS_KEYS 8  // whose rows a group reads at once
#endif
#ifndef HPS_SEGMENTS
#define HPS_SEGMENTS 32
#endif
#ifndef HPS_PATIENCE
#define HPS_PATIENCE 256
#endif

constexpr u32 SQRTN = 2, MAX = 3, COMBINER = 3;                // of options: the combiner; 0 is the sum, 1 the mean
constexpr u32 WIDE_OFFSETS = 4, LAST_OFFSET = 8, PADDED = 16;  // int64; there are bags + 1; padding_key counts

struct PoolSegment {
    const i64* keys;
    const void* offsets;
    const float* weights;
    Unit* out;
    float* divisors;
    uint4* buckets;
    const u8* rows;
    i64 padding_key;
    u64* unread;  // counter of wrong offsets if the host does not wait, else null
    u32 n;
    u32 bags;
    u32 pairs;
    u32 units;  // of a vector: dim / HPS_UNIT; above FORMAT_SHIFT the format of the rows
    u32 out_units;
    u32 first_block;
    u32 missing;
    u32 index;  // of its count
    u32 hotness;
    u32 bags_per_group;
    float max_norm;  // 0: rows are not clipped
    u32 options;
};

struct Pool {
    PoolSegment segments[HPS_SEGMENTS];
    i64* missing_keys;
    u32* missing_positions;
    u32* places;
    u32* entries;
    u32* missing_counts;
    u32* padding_counts;
    u32* any_missing;
    u32* wrong_offsets;
    u32 segment_count;
    u32 zero;  // always 0, which the compiler does not know
};

static_assert(sizeof(PoolSegment) == 120 && sizeof(Pool) == 120 * HPS_SEGMENTS + 72, "hps/cache/cuda/kernels.py packs these");

constexpr u32 WARPS = HPS_THREADS / 32, GROUPS = 32 / HPS_COPY, KEYS = HPS_KEYS, CHUNKS = HPS_CHUNKS;
constexpr u32 MOST_BAGS = 32;  // of a group
constexpr u32 NO_ENTRY = 0xffffffffu;
static_assert(HPS_COPY % KEYS == 0, "whole batches");

struct Floats {
    Unit chunk[CHUNKS];
};

__device__ __forceinline__ void fill(Floats& floats, float value) {
#pragma unroll
    for (u32 c = 0; c < CHUNKS; ++c) {
#pragma unroll
        for (u32 i = 0; i < UNIT; ++i) floats.chunk[c].value[i] = value;
    }
}

__device__ __forceinline__ void add(Floats& sum, float weight, const Floats& row) {
#pragma unroll
    for (u32 c = 0; c < CHUNKS; ++c) {
#pragma unroll
        for (u32 i = 0; i < UNIT; ++i) sum.chunk[c].value[i] = fmaf(weight, row.chunk[c].value[i], sum.chunk[c].value[i]);
    }
}

// Raise a maximum to a row; NaN counts in the first vector of a bag alone, as torch's own kernels compare.
__device__ __forceinline__ void raise_to(Floats& sum, float factor, const Floats& row, bool is_first) {
#pragma unroll
    for (u32 c = 0; c < CHUNKS; ++c) {
#pragma unroll
        for (u32 i = 0; i < UNIT; ++i) {
            const float value = factor * row.chunk[c].value[i], largest = sum.chunk[c].value[i];
            if (value > largest || (is_first && value != value)) sum.chunk[c].value[i] = value;
        }
    }
}

// What a row is multiplied by to be no longer than max_norm; for whole warps.
__device__ __forceinline__ float clip(const Floats& row, float max_norm) {
    float square = 0.0f;
#pragma unroll
    for (u32 c = 0; c < CHUNKS; ++c) {
#pragma unroll
        for (u32 i = 0; i < UNIT; ++i) square = fmaf(row.chunk[c].value[i], row.chunk[c].value[i], square);
    }
#pragma unroll
    for (u32 step = HPS_COPY / 2; step > 0; step /= 2) square += __shfl_xor_sync(FULL_WARP, square, step);
    const float norm = sqrtf(square);
    return norm > max_norm ? max_norm / (norm + 1e-7f) : 1.0f;
}

// The segment that this block works on.
__device__ __forceinline__ const PoolSegment& own_segment(const Pool& request) {
    u32 s = 0;
#pragma unroll
    for (u32 step = HPS_SEGMENTS / 2; step > 0; step /= 2) {
        if (s + step < request.segment_count && request.segments[s + step].first_block <= blockIdx.x) s += step;
    }
    return request.segments[s];
}

// The bags of a group: where their keys begin and end.
struct GroupBags {
    const u32* ends;
    u32 first, count, begin, stop;

    __device__ __forceinline__ GroupBags(const Pool& request, const PoolSegment& segment, u32 (*all)[MOST_BAGS]) {
        const u32 lane = threadIdx.x % 32, group = threadIdx.x / HPS_COPY;
        first = ((blockIdx.x - segment.first_block) * (WARPS * GROUPS) + group) * segment.bags_per_group;
        count = first < segment.bags ? min(segment.bags - first, segment.bags_per_group) : 0;
        u32 own_begin = 0;
        bool wrong = false;
        for (u32 i = lane % HPS_COPY; i < count; i += HPS_COPY) {
            const i64 before = offset_of(segment, first + i), after = offset_of(segment, first + i + 1);
            wrong |= before < 0 || before > after || after > segment.n || (first + i == 0 && before != 0) ||
                     (first + i + 1 == segment.bags && after != segment.n);
            all[group][i] = clamped(segment, after);
            if (i == 0) own_begin = clamped(segment, before);
        }
        if (wrong && segment.unread != nullptr) atomicAdd(segment.unread, 1ull);
        if (wrong && segment.unread == nullptr) *request.wrong_offsets = 1;
        begin = __shfl_sync(FULL_WARP, own_begin, lane - lane % HPS_COPY);
        __syncwarp();
        ends = all[group];
        stop = count > 0 ? ends[count - 1] : 0;
    }

    // Where a bag ends, seen from a position at most there.
    __device__ __forceinline__ u32 end(u32 bag, u32 position) const {
        return max(ends[bag], position) - position;
    }

    static __device__ __forceinline__ i64 offset_of(const PoolSegment& segment, u32 bag) {
        if (segment.offsets == nullptr) return static_cast<i64>(bag) * segment.hotness;
        if (bag == segment.bags && !(segment.options & LAST_OFFSET)) return segment.n;
        return segment.options & WIDE_OFFSETS ? __ldg(static_cast<const i64*>(segment.offsets) + bag)
                                              : __ldg(static_cast<const int*>(segment.offsets) + bag);
    }

    static __device__ __forceinline__ u32 clamped(const PoolSegment& segment, i64 raw) {
        return static_cast<u32>(raw < 0 ? 0 : raw > segment.n ? segment.n : raw);
    }
};

// One after the other, as the compiler would not do it: registers bound the rows in flight.
__device__ __forceinline__ float divided(float value, float by) {
    float quotient;
    asm volatile("div.rn.f32 %0, %1, %2;" : "=f"(quotient) : "f"(value), "f"(by));
    return by == 0.0f ? 0.0f : quotient;
}

// Write the bag's vector: the sum, divided.
__device__ __forceinline__ void store_divided(const PoolSegment& segment, u32 bag, Floats sum, float divisor) {
    if (segment.options & COMBINER) {
#pragma unroll
        for (u32 c = 0; c < CHUNKS; ++c) {
#pragma unroll
            for (u32 i = 0; i < UNIT; ++i) sum.chunk[c].value[i] = divided(sum.chunk[c].value[i], divisor);
        }
    }
    Unit* const row = segment.out + static_cast<u64>(bag) * segment.out_units;
#pragma unroll
    for (u32 c = 0; c < CHUNKS; ++c) {
        const u32 unit = threadIdx.x % HPS_COPY + c * HPS_COPY;
        if (unit < units_of(segment.units)) stream_out(row + unit, sum.chunk[c]);
    }
}

// What a group has added up of a bag, and which one that is.
struct State {
    Floats sum;
#if HPS_PLAIN
    float divisor;
#else
    double divisor;  // weights of both signs may cancel
#endif
    u32 lacks;  // not 0: some vectors
    u32 bag;
};

// Write a bag's vector, or, where it lacks some, what it has of it.
__device__ __forceinline__ void store_bag(const PoolSegment& segment, u32 bag, const State& state, u32 combiner) {
    const float divisor = static_cast<float>(combiner == SQRTN ? sqrt(state.divisor) : state.divisor);
    if (!state.lacks) {
        store_divided(segment, bag, state.sum, divisor);
        return;
    }
    Unit* const row = segment.out + static_cast<u64>(bag) * segment.out_units;
#pragma unroll
    for (u32 c = 0; c < CHUNKS; ++c) {
        const u32 unit = threadIdx.x % HPS_COPY + c * HPS_COPY;
        if (unit < units_of(segment.units)) row[unit] = state.sum.chunk[c];
    }
    if (threadIdx.x % HPS_COPY == 0) segment.divisors[bag] = divisor;
}

// What a warp knows of the keys that it looks up, one a lane. In shared memory, since registers bound the rows in flight.
struct alignas(16) Found {
    u32 row[32];    // of the cache
    u32 index[32];  // of the bucket
    u32 word[32];   // the first of the bucket's header
    i64 key[32];
    float weight[32];
    float factor[32];  // what the row is multiplied by: the weight, less where it is clipped
};

// Find the lanes' keys: a tile of 4 lanes reads the bucket of one, in four rounds; for whole warps.
template <bool STATIC>
__device__ __forceinline__ void find(const uint4* buckets, Found& found, bool asks, int& slot) {
    const u32 lane = threadIdx.x % 32, tile = lane / 4, member = lane % 4, all = __ballot_sync(FULL_WARP, asks);
    uint4 parts[4];
#pragma unroll
    for (u32 r = 0; r < 4; ++r) {
        const u32 bucket = found.index[8 * r + tile];
        if (all >> (8 * r + tile) & 1) parts[r] = load_part(buckets + static_cast<u64>(bucket) * BUCKET_PARTS + member);
    }
#pragma unroll
    for (u32 r = 0; r < 4; ++r) {
        if (all >> (8 * r) & 0xff) {
            int in_part = -1;
#if HPS_STATIC
            const u32 occupied = occupied_of(__shfl_sync(FULL_WARP, parts[r].x, 4 * tile));
            if (STATIC && all >> (8 * r + tile) & 1) {
                in_part = slot_in_static_part(parts[r], member, found.key[8 * r + tile], occupied);
            }
#endif
            if (!STATIC && all >> (8 * r + tile) & 1) in_part = slot_in_part(parts[r], member, found.key[8 * r + tile]);
            const u32 who = __ballot_sync(FULL_WARP, in_part >= 0) >> (lane % 8 * 4) & 15;  // of the lane's own key, if it is its turn
            const int there = __shfl_sync(FULL_WARP, in_part, lane % 8 * 4 + (who ? __ffs(who) - 1 : 0));
            if (lane / 8 == r && asks) slot = who ? there : -1;
            if (member == 0 && all >> (8 * r + tile) & 1) found.word[8 * r + tile] = parts[r].x;
        }
    }
    __syncwarp();
}

// Read the rows of as many keys, widened; all loads are under way before one is waited for.
template <u32 FORMAT>
__device__ __forceinline__ void load_rows(const PoolSegment& segment, const volatile Near& near, const u32* of, Floats (&rows)[KEYS]) {
    if constexpr (!OCCURS<FORMAT>) return;
    const u32 units = units_of(segment.units), dim = units * UNIT, in_group = threadIdx.x % HPS_COPY;
    const u64 row_bytes = 4 * width_of(FORMAT, dim);
    Stored<FORMAT, SharedMemory> stored[KEYS][CHUNKS];
#pragma unroll
    for (u32 k = 0; k < KEYS; ++k) {
#pragma unroll
        for (u32 c = 0; c < CHUNKS; ++c) {
            const bool is_near = HPS_NEAR && of[k] & NEAR_ROW;
            const u8* row = segment.rows + of[k] * row_bytes;
            if (is_near) row = near.rows + (of[k] & ~NEAR_ROW) * row_bytes;
            stored[k][c].load(row, min(in_group + c * HPS_COPY, units - 1), dim);
        }
    }
#pragma unroll
    for (u32 k = 0; k < KEYS; ++k) {
#pragma unroll
        for (u32 c = 0; c < CHUNKS; ++c) rows[k].chunk[c] = stored[k][c].widened();
    }
}

// `count` bits from bit `first` on; what does not fit is left out.
__device__ __forceinline__ u32 bits(u32 first, u32 count) {
    u32 mask;
    asm("bmsk.clamp.b32 %0, %1, %2;" : "=r"(mask) : "r"(first), "r"(count));
    return mask;
}

extern "C" __global__ void __launch_bounds__(HPS_THREADS, HPS_MIN_BLOCKS) pool(const __grid_constant__ Pool request) {
    __shared__ u32 all_ends[WARPS * GROUPS][MOST_BAGS];
    __shared__ Found all_found[WARPS];
    __shared__ State all_before[sizeof(State) <= 160 ? HPS_THREADS : 1];
    const u32 lane = threadIdx.x % 32, in_group = lane % HPS_COPY, group_lane = lane - in_group;  // the first of the group
    const PoolSegment& segment = own_segment(request);
    const u32 units = units_of(segment.units), combiner = segment.options & COMBINER;
    const bool plain = HPS_PLAIN || (segment.weights == nullptr && segment.max_norm == 0.0f);
    const GroupBags bags(request, segment, all_ends);
    Found& found = all_found[threadIdx.x / 32];
    const volatile float* const weights = found.weight + group_lane;
    volatile float* const factors = found.factor + group_lane;
    u64 lane_rows = reinterpret_cast<u64>(segment.rows) + min(in_group, units - 1) * sizeof(Unit);
    u32 row_bytes = units * sizeof(Unit);
    asm volatile("" : "+l"(lane_rows), "+r"(row_bytes));  // else every address takes three instructions
    __shared__ Near near_of[HPS_NEAR ? WARPS : 1];
    const volatile Near& near = near_of[HPS_NEAR ? threadIdx.x / 32 : 0];
#if HPS_NEAR
    if (lane == 0) near_of[threadIdx.x / 32] = segment.pairs != 0 ? near_of_copy(segment.buckets) : Near{};
    __syncwarp();
    const bool notes = near.pairs && is_sampled(threadIdx.x / 32);
#endif
    const u64 lane_near_rows = HPS_NEAR ? reinterpret_cast<u64>(near.rows) + min(in_group, units - 1) * sizeof(Unit) : 0;

    State now;
    const bool is_max = HPS_MAXIMA && combiner == MAX;
    const float start = is_max ? __int_as_float(0xff800000) : 0.0f;
    fill(now.sum, start);
    now.divisor = 0;
    now.lacks = now.bag = 0;
    u32 position = bags.begin;
    i64 next_key = position + in_group < bags.stop ? __ldcs(segment.keys + position + in_group) : 0;
#pragma unroll 1
    while (__any_sync(FULL_WARP, now.bag < bags.count)) {
        const u32 own = position + in_group, count = position < bags.stop ? min(HPS_COPY, bags.stop - position) : 0;
        const bool counts = own < bags.stop && !(segment.options & PADDED && next_key == segment.padding_key);
        const u32 counted = __ballot_sync(FULL_WARP, counts) >> group_lane;
        if (segment.options & PADDED) {
            const u32 padding = __ballot_sync(FULL_WARP, own < bags.stop && !counts);
            if (padding && lane == 0) atomicAdd(request.padding_counts + segment.index, __popc(padding));
        }
        __syncwarp();
        found.key[lane] = next_key;
        if (!HPS_PLAIN) found.weight[lane] = found.factor[lane] = counts && segment.weights != nullptr ? __ldcs(segment.weights + own) : 1.0f;
        const bool is_last = position + count >= bags.stop;
        State before;
        if (sizeof(State) <= 160) {
            all_before[threadIdx.x] = now;
        } else {
            before = now;
        }
        bool refused = false;
        u32 goods;
#pragma unroll 1
        for (u32 attempt = 0;; ++attempt) {
            bool asks = counts && segment.pairs != 0 && !refused;
            int slot = -1;
            bool is_near = false;
#if HPS_NEAR
            u32 near_index = 0, near_word = 0;
            const bool looks_near = asks && near.may_have(home_of(found.key[lane], segment.pairs) / 2);
            if (__any_sync(FULL_WARP, looks_near)) {
                const uint4* const near_buckets = near.buckets;
                found.index[lane] = near_home_of(near, found.key[lane]);
                __syncwarp();
                find<false>(near_buckets, found, looks_near, slot);
                const bool next_door = looks_near && slot < 0 && found.word[lane] >> 24;
                if (__any_sync(FULL_WARP, next_door)) {
                    if (next_door) found.index[lane] ^= 1;
                    __syncwarp();
                    find<false>(near_buckets, found, next_door, slot);
                }
                is_near = slot >= 0;
                near_index = found.index[lane];
                near_word = found.word[lane];
                asks = asks && !is_near;
                __syncwarp();
            }
#endif
            found.index[lane] = home_of(found.key[lane], segment.pairs);
            __syncwarp();
            find<HPS_STATIC>(segment.buckets, found, asks, slot);
            const bool strayed = asks && slot < 0 && strays_of(found.word[lane]);
            bool moved = false;
#if HPS_STATIC
            if (__any_sync(FULL_WARP, asks && slot < 0)) {  // a key is not at home: as in query.cu
                const u32 home = found.index[lane], home_word = found.word[lane];
                acquire();
#else
            if (__any_sync(FULL_WARP, strayed)) {  // a key is not at home, and some key has strayed: look where it may be
#endif
                if (strayed) found.index[lane] = other_bucket(found.index[lane], found.key[lane], segment.pairs);
                __syncwarp();
                find<HPS_STATIC>(segment.buckets, found, strayed, slot);
#if HPS_STATIC
                const bool missing = asks && slot < 0;
                if (__any_sync(FULL_WARP, missing)) {  // it may have moved meanwhile
                    acquire();
                    __syncwarp();
                    if (missing) found.index[lane] = home;
                    __syncwarp();
                    find<true>(segment.buckets, found, missing, slot);
                    acquire();
                    if (missing) {
                        moved = slot >= 0 || has_changed(segment.buckets + static_cast<u64>(home) * BUCKET_PARTS, home_word);
                        slot = -1;
                    }
                }
#endif
            }
#if HPS_NEAR
            if (is_near) {
                found.index[lane] = near_index;
                found.word[lane] = near_word;
            }
#endif
            acquire();
            const bool copies = slot >= 0 && !(found.word[lane] & 1);
            bool retry = moved || (slot >= 0 && !copies);  // the key moved, or a writer owns the bucket
            found.row[lane] = copies ? (found.index[lane] * SLOTS + slot) | (is_near ? NEAR_ROW : 0) : 0;
#if HPS_NEAR
            if (notes) {
                const Sharing& sharing = sharing_of(segment.buckets);
                const bool neighbour = copies && !is_near && near.may_have(found.index[lane] / 2);
                note_samples(sharing, found.key[lane], neighbour, lane);
            }
#endif
            goods = __ballot_sync(FULL_WARP, copies) >> group_lane;
            __syncwarp();

            const u32 lacking = counted & ~goods;
            u32 at = 0;  // keys that are added
            u32 end = now.bag < bags.count ? bags.end(now.bag, position) : 0;  // of the bag's keys in the chunk
#pragma unroll 1
            for (u32 from = 0; from == 0 || __any_sync(FULL_WARP, from < count); from += KEYS) {
                Floats rows[KEYS];
                const u32 here = goods >> from & ((1u << KEYS) - 1);
                // Without a condition of their own, the loads are all under way before one is waited for.
                if (__any_sync(FULL_WARP, here)) {
                    const u32* const of = found.row + group_lane + from;
                    if constexpr (!PACKED) {
#pragma unroll
                        for (u32 k = 0; k < KEYS; ++k) {
                            const bool is_near = HPS_NEAR && of[k] & NEAR_ROW;
                            const u64 rows_at = is_near ? lane_near_rows : lane_rows;
                            const u32 number = is_near ? of[k] & ~NEAR_ROW : of[k];
                            const Unit* const row = reinterpret_cast<const Unit*>(rows_at + static_cast<u64>(number) * row_bytes);
#pragma unroll
                            for (u32 c = 0; c < CHUNKS; ++c) {
                                const u32 unit = min(in_group + c * HPS_COPY, units - 1) - min(in_group, units - 1);
                                rows[k].chunk[c] = load_unit(row + unit);
                            }
                        }
                    } else {
                        switch (format_of(segment.units)) {
                            case FLOAT32: load_rows<FLOAT32>(segment, near, of, rows); break;
                            case FLOAT16: load_rows<FLOAT16>(segment, near, of, rows); break;
                            case BFLOAT16: load_rows<BFLOAT16>(segment, near, of, rows); break;
                            case INT8: load_rows<INT8>(segment, near, of, rows); break;
                        }
                    }
                }
                if (!HPS_PLAIN && segment.max_norm > 0.0f) {
#pragma unroll
                    for (u32 k = 0; k < KEYS; ++k) {
#pragma unroll
                        for (u32 c = 0; c < CHUNKS; ++c) {
#pragma unroll
                            for (u32 i = 0; i < UNIT; ++i) {
                                if (!(here >> k & 1) || in_group + c * HPS_COPY >= units) rows[k].chunk[c].value[i] = 0.0f;
                            }
                        }
                        const float clipped = weights[from + k] * clip(rows[k], segment.max_norm);
                        if (in_group == 0) factors[from + k] = clipped;
                    }
                    __syncwarp();
                }
                const u32 until = min(from + KEYS, count);
                const bool ends = until == count && is_last;
#pragma unroll 1
                while (now.bag < bags.count) {
                    const u32 to = min(end, until), range = bits(at, to - at), adds = (range & goods) >> from;
                    if (is_max) {
                        u32 first = now.divisor == 0 ? range & counted : 0;
                        first &= -first;  // the bag's first key that counts
                        if (first) now.divisor = first & goods ? 1 : -1;
#pragma unroll
                        for (u32 k = 0; k < KEYS; ++k) {
                            if (adds >> k & 1) raise_to(now.sum, factors[from + k], rows[k], first >> from >> k & 1);
                        }
                    } else if (plain && adds == (1u << KEYS) - 1) {
#pragma unroll
                        for (u32 k = 0; k < KEYS; ++k) add(now.sum, 1.0f, rows[k]);
                    } else {
#pragma unroll
                        for (u32 k = 0; k < KEYS; ++k) {
                            if (adds >> k & 1) add(now.sum, HPS_PLAIN ? 1.0f : factors[from + k], rows[k]);
                        }
                    }
                    now.lacks |= range & lacking;
                    if (combiner != 0 && !is_max) {
                        if (HPS_PLAIN || segment.weights == nullptr) {
                            now.divisor += __popc(range & counted);
                        } else {
                            for (u32 open = range & counted; open; open &= open - 1) {
                                const double weight = weights[__ffs(open) - 1];
                                now.divisor += combiner == SQRTN ? weight * weight : weight;
                            }
                        }
                    }
                    at = to;
                    if (end > until && !ends) break;  // the bag goes on
                    store_bag(segment, bags.first + now.bag, now, combiner);
                    fill(now.sum, start);
                    now.divisor = 0;
                    now.lacks = 0;
                    if (++now.bag < bags.count) end = bags.end(now.bag, position);
                }
                __syncwarp();
            }

            const bool rereads = goods >> in_group & 1;
            const u32 own_index = found.index[lane];
            const u32 own_slot = (is_near ? found.row[lane] & ~NEAR_ROW : found.row[lane]) - own_index * SLOTS;
            uint4* buckets = segment.buckets;
            if (is_near) buckets = near.buckets;
            uint4* const bucket = buckets + static_cast<u64>(own_index) * BUCKET_PARTS;
            const u64* const header = reinterpret_cast<const u64*>(bucket);
            const i64 key_again = rereads ? static_cast<i64>(load_word(header + 1 + own_slot)) : 0;

            // 0, once all rows and keys are here: their sum depends on the rows, and a bag that was written was complete.
            u32 summed = static_cast<u32>(key_again);
#pragma unroll
            for (u32 c = 0; c < CHUNKS; ++c) summed |= __float_as_uint(now.sum.chunk[c].value[0]);
            const u32 late = __any_sync(FULL_WARP, summed & request.zero);
            acquire();
            if (own + HPS_COPY < bags.stop) next_key = __ldcs(segment.keys + own + HPS_COPY);  // arrives with what follows
            if (rereads) {
                const u64 again = load_word(header + late);
                retry = ((again ^ found.word[lane]) & 0xffff) != 0 || key_again != found.key[lane];
#if !HPS_STATIC
                const u32 score = score_of(static_cast<u32>(again >> 32), own_slot);
                if (score < ENOUGH_SCORE) {
                    fetch_or(scores_at(bucket), (score < HIT_SCORE ? HIT_SCORE : TOP_SCORE) << (4 * own_slot));
                }
#endif
            }
            if (!__any_sync(FULL_WARP, retry)) break;
            if (attempt >= HPS_PATIENCE) refused |= retry;
            now = sizeof(State) <= 160 ? all_before[threadIdx.x] : before;
        }

        const bool missed = counts && !(goods >> in_group & 1);
        const u32 misses = __ballot_sync(FULL_WARP, missed);
        if (misses) {
            u32 to = 0;
            if (lane == 0) {
                to = atomicAdd(request.missing_counts + segment.index, __popc(misses));
                if (to == 0) *request.any_missing = 1;
            }
            to = __shfl_sync(FULL_WARP, to, 0) + __popc(misses & ((1u << lane) - 1));
            if (missed && to < segment.n) {  // wrong offsets may name a key twice
                request.missing_keys[segment.missing + to] = found.key[lane];
                request.missing_positions[segment.missing + to] = to;
                request.places[segment.missing + to] = own;
            }
        }
        position += count;
    }
}

extern "C" __global__ void __launch_bounds__(HPS_THREADS) number(const __grid_constant__ Pool request) {
    const PoolSegment& segment = request.segments[blockIdx.x % request.segment_count];
    const u32 block = blockIdx.x / request.segment_count, blocks = gridDim.x / request.segment_count;
    const u32 misses = min(request.missing_counts[segment.index], segment.n);
    for (u32 i = block * HPS_THREADS + threadIdx.x; i < misses; i += blocks * HPS_THREADS) {
        request.entries[segment.missing + request.places[segment.missing + i]] = i;
    }
    if (block == 0 && threadIdx.x == 0) atomicMin(request.missing_counts + segment.index, segment.n);
}

extern "C" __global__ void __launch_bounds__(HPS_THREADS) pool_rest(const __grid_constant__ Pool request) {
    __shared__ u32 all_ends[WARPS * GROUPS][MOST_BAGS];
    const u32 lane = threadIdx.x % 32, in_group = lane % HPS_COPY, group_lane = lane - in_group;
    const u32 of_group = HPS_COPY == 32 ? FULL_WARP : ((1u << (HPS_COPY % 32)) - 1);
    const PoolSegment& segment = own_segment(request);
    const u32 units = units_of(segment.units);
    const bool is_max = HPS_MAXIMA && (segment.options & COMBINER) == MAX;
    const GroupBags bags(request, segment, all_ends);
    u32 position = bags.begin;
#pragma unroll 1
    for (u32 bag = 0; __any_sync(FULL_WARP, bag < bags.count); ++bag) {
        const u32 end = bag < bags.count ? bags.ends[bag] : position;
        bool lacks = false;
        Floats sum;
#pragma unroll 1
        while (__any_sync(FULL_WARP, position < end)) {
            const u32 p = position + in_group;
            const u32 entry = p < end ? request.entries[segment.missing + p] : NO_ENTRY;
            const float weight = entry != NO_ENTRY && segment.weights != nullptr ? segment.weights[p] : 1.0f;
            u32 open = __ballot_sync(FULL_WARP, entry != NO_ENTRY) >> group_lane & of_group;
            while (__any_sync(FULL_WARP, open != 0)) {
                const u32 from = group_lane + (open ? __ffs(open) - 1 : 0);
                const u32 row = __shfl_sync(FULL_WARP, entry, from);
                float factor = __shfl_sync(FULL_WARP, weight, from);
                Floats value;
                fill(value, 0.0f);
                const bool is_first = is_max && open && !lacks && segment.divisors[bags.first + bag] < 0.0f;
                if (open && !lacks) {
                    lacks = true;
#pragma unroll
                    for (u32 c = 0; c < CHUNKS; ++c) {
                        const u32 unit = in_group + c * HPS_COPY;
                        Unit* const out = segment.out + static_cast<u64>(bags.first + bag) * segment.out_units;
                        if (unit < units) sum.chunk[c] = out[unit];
                    }
                }
                if (open) {
#pragma unroll
                    for (u32 c = 0; c < CHUNKS; ++c) {
                        const u32 unit = in_group + c * HPS_COPY;
                        if (unit < units) value.chunk[c] = reinterpret_cast<const Unit*>(segment.rows)[static_cast<u64>(row) * units + unit];
                    }
                }
                if (segment.max_norm > 0.0f) factor *= clip(value, segment.max_norm);
                if (open && is_max) raise_to(sum, factor, value, is_first);
                if (open && !is_max) add(sum, factor, value);
                open &= open - 1;
            }
            position = min(position + HPS_COPY, max(end, position));
        }
        if (lacks) store_divided(segment, bags.first + bag, sum, is_max ? 1.0f : segment.divisors[bags.first + bag]);
    }
}

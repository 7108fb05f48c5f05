// PURPOSE     Writes vectors of keys into a table: replaces those of resident keys, admits keys that are not, or both.
// ARRAYS      For each part: keys (n,) int64, in. vectors (n, dim) float32, in, aligned to HPS_UNIT floats. chosen (n,) uint8 or
//             null, in: keys whose byte is 0 are left out; null chooses all. buckets and rows of its table, in/out. counters,
//             in/out: keys admitted and keys evicted are added. count uint32 or null, in: there are fewer keys than n if it is
//             less, and 0 afterwards. epochs (n,) uint64, in, and epoch uint64, in, or both null: a key is left out unless
//             its epoch is even and the present one. finished uint32, in/out, with count: must be 0 before, 0 afterwards.
// LAUNCH      Blocks of HPS_THREADS; a part has ceil(n / (HPS_THREADS / 8)) of them, from its first_block on. A tile of 8 lanes
//             owns one key. A part has no n = 0; tiles past a ragged end have no key. Parts are of different tables.
// INVARIANTS  A key is in at most one slot of its pair. Where a key occurs twice among `keys`, one of its vectors wins,
//             whole. A key that is admitted takes an empty slot at home, else one at its neighbour, else that of the smallest
//             score at home (the first of equals), whose key is evicted; the other scores there then fall by that much.
//             Replacing a vector changes no score. With ADMIT alone, the keys are those of misses, and one evicts another only
//             if that one's score is 0 or it is the key that was refused last at its home, by 8 bits of their hashes. Else it is
//             refused: its home notes it, and every second key by its hash makes all scores there fall by 1.
//             The epoch is read while the pair is owned. So whoever modifies rows below the cache, makes the epoch odd first, and
//             updates or erases the keys here afterwards, leaves no older vector behind: either that update comes later and
//             finds the key, or this sees the epoch.
// RACES       A tile looks at a pair, and writes to it, only while it owns it (writer.cuh). A query that reads meanwhile notices
//             by the version (embedding_cache.cuh). Launches on one table may run at once: the cache orders
//             them, except those that admit what was read from attached tables, which go by the epoch.
// TWIN        hps.cache.cpu.kernels.write

#include "embedding_cache.cuh"
#include "writer.cuh"

#ifndef HPS_THREADS
#define HPS_THREADS 256
#endif
#ifndef HPS_MIN_BLOCKS
#define HPS_MIN_BLOCKS 1  // of an SM: bounds the registers
#endif
#ifndef HPS_PARTS
#define HPS_PARTS 1  // of one launch, at most
#endif
#ifndef HPS_ROW_LOADS
#define HPS_ROW_LOADS 4  // units of a vector that a lane has in flight
#endif
#ifndef HPS_LONG_ROWS
#define HPS_LONG_ROWS 1  // 0: no row has more than 8 HPS_ROW_LOADS units
#endif

constexpr u32 ROW_LOADS = HPS_ROW_LOADS;
constexpr u32 REPLACE = 1, ADMIT = 2;  // with both, no key is refused

struct Part {
    Table table;
    const i64* keys;
    const Unit* vectors;
    const u8* chosen;
    u32* count;
    const u64* epochs;
    const u64* epoch;
    u32 n;
    u32 first_block;
};

struct Insert {
    Part parts[HPS_PARTS];
    u32* finished;
    u32 part_count;
    u32 mode;  // REPLACE, ADMIT or both
};

static_assert(sizeof(Table) == 48 && sizeof(Part) == 104, "hps/cache/cuda/kernels.py packs these");
static_assert(sizeof(Insert) == 104 * HPS_PARTS + 16, "hps/cache/cuda/kernels.py packs this");

// How good a slot is to admit a key to, the smaller the better: an empty one at home, an empty one next door, or one whose key
// would be evicted: at home by its score, next door never.
constexpr u32 EMPTY_AT_HOME = 0, EMPTY_NEXT_DOOR = 1, EVICTS = 2, NEVER = 255;

__device__ __forceinline__ u32 rank_of(i64 there, i64 filler, bool at_home, u32 score) {
    if (there == filler) return at_home ? EMPTY_AT_HOME : EMPTY_NEXT_DOOR;
    return at_home ? EVICTS + score : NEVER;
}

// The slot of the pair that is best to admit a key to, and above it, from bit 8 on, how good it is; for whole warps.
__device__ __forceinline__ u32 choose_slot(const Writer& writer, const Table& table, const uint4& part, u32 home) {
    const u32 bucket = writer.member / BUCKET_PARTS, within = writer.member % BUCKET_PARTS, high = bucket * SLOTS + 2 * within;
    const u32 scores = __shfl_sync(FULL_WARP, part.y, writer.tile * TILE + bucket * BUCKET_PARTS);
    const i64 filler = filler_of(table, home / 2);
    const bool at_home = bucket == home % 2;
    u32 best = rank_of(key_of(part.z, part.w), filler, at_home, score_of(scores, 2 * within)) << 8 | high;
    if (within != 0) {
        const u32 low = rank_of(key_of(part.x, part.y), filler, at_home, score_of(scores, 2 * within - 1));
        best = min(best, low << 8 | (high - 1));
    }
#pragma unroll
    for (u32 other = TILE / 2; other > 0; other /= 2) best = min(best, __shfl_xor_sync(FULL_WARP, best, other));
    return best;
}

// Give a slot of an owned pair to a key, and keep scores and counts of strays right; for the lanes of a tile. True for one.
__device__ __forceinline__ bool admit(const Writer& writer, const Table& table, const uint4& part, i64 key, u32 home, u32 slot,
                                      u32 rank, bool again) {
    const u32 bucket = writer.member / BUCKET_PARTS, within = writer.member % BUCKET_PARTS;
    const u32 target = slot / SLOTS, at = slot % SLOTS;
    if (rank == EMPTY_NEXT_DOOR && within == 0 && bucket == home % 2) {
        *static_cast<volatile u8*>(strays_at(writer.bucket(bucket))) = (part.x >> 24) + 1;
    }
    const bool holds_low = within != 0 && bucket * SLOTS + 2 * within - 1 == slot,
               holds_high = bucket * SLOTS + 2 * within == slot;
    if (rank >= EVICTS && (holds_low || holds_high)) {  // who holds the key that goes tells whether it had strayed
        const u32 lost = home_of(holds_low ? key_of(part.x, part.y) : key_of(part.z, part.w), table.pairs) % 2;
        volatile u8* strays = strays_at(writer.bucket(lost));
        if (lost != target) *strays = *strays - 1;
    }
    if (within != 0 || bucket != target) return false;
    const u32 fallen = rank > EVICTS ? part.y - (rank - EVICTS) * 0x01111111u : part.y;
    const u32 score = rank < EVICTS ? EMPTY_SCORE : again ? AGAIN_SCORE : FIRST_SCORE;
    const u32 scores = (fallen & ~(15u << (4 * at))) | score << (4 * at);
    *static_cast<volatile u32*>(scores_at(writer.bucket(target))) = scores;
    *static_cast<volatile i64*>(key_at(writer.bucket(target), at)) = key;
    return true;
}

// Note at its home that a key was refused; no score there is 0. For the lanes of a tile.
__device__ __forceinline__ void refuse(const Writer& writer, const uint4& part, u32 home, u32 name) {
    if (writer.member != home % 2 * BUCKET_PARTS) return;
    uint4* const bucket = writer.bucket(home % 2);
    *static_cast<volatile u8*>(refused_at(bucket)) = static_cast<u8>(name);
    if (name % 2 == 0) *static_cast<volatile u32*>(scores_at(bucket)) = part.y - 0x01111111u;
}

extern "C" __global__ void __launch_bounds__(HPS_THREADS, HPS_MIN_BLOCKS) insert(const __grid_constant__ Insert request) {
    __shared__ u32 admitted, evicted;
    if (threadIdx.x == 0) admitted = evicted = 0;
    __syncthreads();
    u32 p = 0;
#pragma unroll
    for (u32 step = HPS_PARTS / 2; step > 0; step /= 2) {
        if (p + step < request.part_count && request.parts[p + step].first_block <= blockIdx.x) p += step;
    }
    const Part& part_of = request.parts[p];
    const Table& table = part_of.table;
    const u32 lane = threadIdx.x % 32, tile = lane / TILE, member = lane % TILE;
    const u32 units = table.dim / UNIT;
    const u32 index = (blockIdx.x - part_of.first_block) * (HPS_THREADS / TILE) + threadIdx.x / TILE;
    const u32 n = part_of.count == nullptr ? part_of.n : min(part_of.n, *part_of.count);

    bool pending = index < n && (part_of.chosen == nullptr || part_of.chosen[index]);
    i64 key = 0;
    u32 home = 0;
    u64 epoch = 0;
    if (pending) {
        key = __ldcs(part_of.keys + index);
        home = home_of(key, table.pairs);
        if (part_of.epochs != nullptr) {
            epoch = part_of.epochs[index];
            pending = (epoch & 1) == 0;
        }
    }
    const u32 pair = home / 2;
    Writer writer{tile, member, table.buckets + static_cast<u64>(pair) * PAIR_PARTS, 0, 0};
    const Unit* vector = part_of.vectors + static_cast<u64>(index) * units;
    Unit value[ROW_LOADS];
#pragma unroll
    for (u32 r = 0; r < ROW_LOADS; ++r) {
        if (pending && r * TILE + member < units) value[r] = stream_in(vector + r * TILE + member);
    }

    if (request.mode != (REPLACE | ADMIT)) {  // do not own pairs that will not change
        const bool resident = writer.find(writer.load(pending), key, pending) >= 0;
        pending = pending && (request.mode & (resident ? REPLACE : ADMIT));
    }

#pragma unroll 1
    for (u32 attempt = 0; __any_sync(FULL_WARP, pending); ++attempt) {
        const bool own = writer.take(pending, attempt);
        if (!__any_sync(FULL_WARP, own)) {
            back_off(attempt);
            continue;
        }
        __syncwarp();
        fence();
        const uint4 part = writer.load(own);
        int slot = writer.find(part, key, own);
        const bool resident = slot >= 0;
        const bool late = own && part_of.epoch != nullptr && load_word(part_of.epoch) != epoch;
        bool writes = own && !late && (request.mode & (resident ? REPLACE : ADMIT));
        if (__any_sync(FULL_WARP, writes && !resident)) {
            const u32 best = choose_slot(writer, table, part, home), rank = best >> 8, name = mix(key) & 0xff;
            const u32 header = __shfl_sync(FULL_WARP, part.x, tile * TILE + home % 2 * BUCKET_PARTS);
            const bool again = (header >> 16 & 0xff) == name;
            if (writes && !resident) {
                slot = best & 0xff;
                if (request.mode == ADMIT && rank > EVICTS && !again) {
                    refuse(writer, part, home, name);
                    writes = false;
                } else if (admit(writer, table, part, key, home, slot, rank, again)) {
                    atomicAdd(&admitted, 1);
                    if (rank >= EVICTS) atomicAdd(&evicted, 1);
                }
            }
        }
        if (writes) {
            const u64 row = static_cast<u64>(pair) * (2 * SLOTS) + slot;
            Unit* const to = reinterpret_cast<Unit*>(table.rows) + row * units;
#pragma unroll
            for (u32 r = 0; r < ROW_LOADS; ++r) {
                if (r * TILE + member < units) store_unit(to + r * TILE + member, value[r]);
            }
#if HPS_LONG_ROWS
#pragma unroll 4
            for (u32 unit = ROW_LOADS * TILE + member; unit < units; unit += TILE)
                store_unit(to + unit, stream_in(vector + unit));
#endif
        }
        writer.give_back(own, writes);
        if (own) pending = false;
    }

    __syncthreads();
    if (threadIdx.x == 0) {
        if (admitted) atomicAdd(table.counters, static_cast<u64>(admitted));
        if (evicted) atomicAdd(table.counters + 1, static_cast<u64>(evicted));
        if (request.finished != nullptr) {  // every block has read the counts before it says that it has finished
            __threadfence();
            if (atomicAdd(request.finished, 1) == gridDim.x - 1) {
                for (u32 i = 0; i < request.part_count; ++i) *request.parts[i].count = 0;
                *request.finished = 0;
            }
        }
    }
}

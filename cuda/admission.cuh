// How a key of a table gets its vector: replaced where it is resident, admitted where it is not; pasted after writer.cuh.
//
// A key that is admitted takes an empty slot at home, else one at its neighbour, else that of the smallest score at home (the first
// of equals), whose key is evicted; the other scores there then fall by that much. Replacing a vector changes no score. With ADMIT
// alone, the keys are those of misses, and one evicts another only if that one's score is 0 or it is the key that was refused last
// at its home, by 8 bits of their hashes. Else it is refused: its home records it, and every second key by its hash makes all scores
// there fall by 1.
// The epoch is read while the pair is owned. A modification of rows below the cache makes the epoch odd first, and updates or
// erases the keys here afterwards. So no older vector remains: either that update comes later and finds the key, or this kernel
// sees the epoch.

#ifndef HPS_ROW_LOADS
#define HPS_ROW_LOADS 4  // pieces of a row that a lane has in flight
#endif
#ifndef HPS_LONG_ROWS
#define HPS_LONG_ROWS 1  // 0: no row has more than 8 HPS_ROW_LOADS pieces
#endif

constexpr u32 REPLACE = 1, ADMIT = 2;  // with both, no key is refused

// Keys that a block has admitted and evicted, in shared memory.
struct Admissions {
    u32 admitted, evicted;

    __device__ __forceinline__ void add_to(u64* counters) const {
        if (admitted) ::add_to(counters, static_cast<u64>(admitted));
        if (evicted) ::add_to(counters + 1, static_cast<u64>(evicted));
    }
};

// How good a slot is to admit a key to, the smaller the better: an empty one at home, an empty one next door, or one whose key
// would be evicted: at home by its score, next door never.
constexpr u32 EMPTY_AT_HOME = 0, EMPTY_NEXT_DOOR = 1, EVICTS = 2, NEVER = 255;

__device__ __forceinline__ u32 rank_of(i64 there, i64 filler, bool at_home, u32 score) {
    if (there == filler) return at_home ? EMPTY_AT_HOME : EMPTY_NEXT_DOOR;
    return at_home ? EVICTS + score : NEVER;
}

// The slot of a pair that is best to admit a key to; for whole warps.
struct Choice {
    u32 slot, rank;
    bool again;  // the key is the one that was refused last at its home

    __device__ __forceinline__ Choice(const Writer& writer, const Table& table, const uint4& part, i64 key, u32 home) {
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
        slot = best & 0xff;
        rank = best >> 8;
        again = (__shfl_sync(FULL_WARP, part.x, writer.tile * TILE + home % 2 * BUCKET_PARTS) >> 16 & 0xff) == (mix(key) & 0xff);
    }

    // Of a key that missed.
    __device__ __forceinline__ bool refuses() const { return rank > EVICTS && !again; }
};

// Give a slot of an owned pair to a key, and keep scores and counts of strays right; for the lanes of a tile. True for one.
__device__ __forceinline__ bool admit(const Writer& writer, const Table& table, const uint4& part, i64 key, u32 home,
                                      const Choice& choice) {
    const u32 slot = choice.slot, rank = choice.rank;
    const u32 bucket = writer.member / BUCKET_PARTS, within = writer.member % BUCKET_PARTS;
    const u32 target = slot / SLOTS, at = slot % SLOTS;
    if (rank == EMPTY_NEXT_DOOR && within == 0 && bucket == home % 2) {
        writer.put(strays_at(writer.bucket(bucket)), static_cast<u8>((part.x >> 24) + 1));
    }
    const bool holds_low = within != 0 && bucket * SLOTS + 2 * within - 1 == slot,
               holds_high = bucket * SLOTS + 2 * within == slot;
    if (rank >= EVICTS && (holds_low || holds_high)) {  // the lane of the evicted key checks whether it had strayed
        const u32 lost = home_in(table, holds_low ? key_of(part.x, part.y) : key_of(part.z, part.w)) % 2;
        u8* const strays = strays_at(writer.bucket(lost));
        if (lost != target) writer.put(strays, static_cast<u8>(*static_cast<volatile u8*>(strays) - 1));
    }
    if (within != 0 || bucket != target) return false;
    const u32 fallen = rank > EVICTS ? part.y - (rank - EVICTS) * 0x01111111u : part.y;
    const u32 score = rank < EVICTS ? EMPTY_SCORE : choice.again ? AGAIN_SCORE : FIRST_SCORE;
    const u32 scores = (fallen & ~(15u << (4 * at))) | score << (4 * at);
    writer.put(scores_at(writer.bucket(target)), scores);
    writer.put(key_at(writer.bucket(target), at), key);
    return true;
}

// Record at its home that a key was refused; no score there is 0. The pair need not be owned: concurrent changes of scores and of
// the refused key may be lost, which costs only recency. For the lanes of a tile.
__device__ __forceinline__ void refuse(const Writer& writer, const uint4& part, u32 home, i64 key) {
    if (writer.member != home % 2 * BUCKET_PARTS) return;
    uint4* const bucket = writer.bucket(home % 2);
    const u32 name = mix(key) & 0xff;
    *static_cast<volatile u8*>(refused_at(bucket)) = static_cast<u8>(name);
    if (name % 2 == 0) writer.put(scores_at(bucket), part.y - 0x01111111u);
}

// Whether the keys of the tiles of 8 lanes, which own nothing, may be written; for whole warps. Of a key that is refused a record
// is left. The owner of a pair may be about to admit the key.
__device__ __forceinline__ bool may_write(const Table& table, u32 mode, i64 key, bool pending) {
    const u32 home = pending ? home_in(table, key) : 0;
    const Writer writer(table, home / 2);
    uint4 part = writer.load(pending);
    const bool resident = writer.find(part, key, pending) >= 0, owned = writer.is_owned(part);
    pending = pending && (owned || mode & (resident ? REPLACE : ADMIT));
    const bool chooses = mode == ADMIT && pending && !owned;
    if (__any_sync(FULL_WARP, chooses)) {
        writer.gather_scores(part, chooses);
        const Choice choice(writer, table, part, key, home);
        if (chooses && choice.refuses()) {
            refuse(writer, part, home, key);
            pending = false;
        }
    }
    return pending;
}

// Write the vectors of up to 4 keys, one a tile of 8 lanes; for whole warps. `pending` marks the tiles that have a key. A key is
// left out if `epoch_at` is given and does not hold `epoch`. Owns no pair that will not change, unless the keys are `checked`.
__device__ __forceinline__ void write_keys(const Table& table, u32 mode, i64 key, bool pending, const Piece* vector, u32 pieces,
                                           const u64* epoch_at, u64 epoch, Admissions& counts, bool checked = false) {
    constexpr u32 ROW_LOADS = HPS_ROW_LOADS;
    const u32 home = pending ? home_in(table, key) : 0, pair = home / 2;
    Writer writer(table, pair);
    const u32 tile = writer.tile, member = writer.member;
    Piece value[ROW_LOADS];
#pragma unroll
    for (u32 r = 0; r < ROW_LOADS; ++r) {
        if (pending && r * TILE + member < pieces) value[r] = stream_in(vector + r * TILE + member);
    }

    if (mode != (REPLACE | ADMIT) && !checked) pending = may_write(table, mode, key, pending);

#pragma unroll 1
    for (u32 attempt = 0; __any_sync(FULL_WARP, pending); ++attempt) {
        const bool own = writer.take(pending, attempt);
        if (!__any_sync(FULL_WARP, own)) {
            back_off(attempt);
            continue;
        }
        __syncwarp();
        fence();
        uint4 part = writer.load(own);
        int slot = writer.find(part, key, own);
        const bool resident = slot >= 0;
        writer.gather_scores(part, own && !resident);
        const bool late = own && epoch_at != nullptr && load_word(epoch_at) != epoch;
        bool writes = own && !late && (mode & (resident ? REPLACE : ADMIT));
        if (__any_sync(FULL_WARP, writes && !resident)) {
            const Choice choice(writer, table, part, key, home);
            if (writes && !resident) {
                slot = choice.slot;
                if (mode == ADMIT && choice.refuses()) {
                    refuse(writer, part, home, key);
                    writes = false;
                } else if (admit(writer, table, part, key, home, choice)) {
                    atomicAdd(&counts.admitted, 1);
                    if (choice.rank >= EVICTS) atomicAdd(&counts.evicted, 1);
                }
            }
        }
        if (writes) {
            const u64 row = static_cast<u64>(pair) * (2 * SLOTS) + slot;
            Piece* const to = reinterpret_cast<Piece*>(table.rows) + row * pieces;
#pragma unroll
            for (u32 r = 0; r < ROW_LOADS; ++r) {
                if (r * TILE + member < pieces) store_unit(to + r * TILE + member, value[r]);
            }
#if HPS_LONG_ROWS
#pragma unroll 4
            for (u32 piece = ROW_LOADS * TILE + member; piece < pieces; piece += TILE)
                store_unit(to + piece, stream_in(vector + piece));
#endif
        }
        writer.give_back(own, writes);
        if (own) pending = false;
    }
}

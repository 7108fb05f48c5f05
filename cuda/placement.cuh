// How a key of a static table finds its place; pasted after walk.cuh and writer.cuh, where admission.cuh stands for other tables.
//
// A key is replaced where it is resident, else it takes the first empty slot of its walk. A writer of a key owns the pair of
// its home meanwhile. So the key stays in place while its walk is searched, though other keys on it may change: the slot found is
// checked again once its pair is owned, too. A tile that cannot own that pair at once releases both and retries. That terminates:
// the tiles of a warp, which run in step, then take turns, and warps wait for different times.
// Counts of keys that passed are changed by atomics, also in pairs that others own, before the key's home is released.

#ifndef HPS_ROW_LOADS
#define HPS_ROW_LOADS 4  // pieces of a row that a lane has in flight
#endif
#ifndef HPS_LONG_ROWS
#define HPS_LONG_ROWS 1  // 0: no row has more than 8 HPS_ROW_LOADS pieces
#endif

constexpr u32 REPLACE = 1, ADMIT = 2;

// Keys that a block has admitted, and that found no place, in shared memory.
struct Admissions {
    u32 admitted, unplaced;

    __device__ __forceinline__ void add_to(u64* counters) const {
        if (admitted) ::add_to(counters, static_cast<u64>(admitted));
        if (unplaced) ::add_to(counters + UNPLACED, static_cast<u64>(unplaced));
    }
};

// What the lanes of a tile know of a pair.
struct Look {
    uint4 part;
    u32 occupied[2];  // of its buckets
    int slot;         // of the 14 that holds the key, or -1
    int empty;        // the first empty one, seen from the key's side, or -1
};

// Look for a key in a pair; for whole warps. `side` is that of the key's home.
__device__ __forceinline__ Look look_at(const Writer& writer, i64 key, u32 side, bool asked) {
    Look look;
    look.part = writer.load(asked);
    const u32 first = writer.tile * TILE, bucket = writer.member / BUCKET_PARTS;
    look.occupied[0] = occupied_of(__shfl_sync(FULL_WARP, look.part.x, first));
    look.occupied[1] = occupied_of(__shfl_sync(FULL_WARP, look.part.x, first + BUCKET_PARTS));
    const u32 own = bucket == 0 ? look.occupied[0] : look.occupied[1];
    const int in_part = asked ? slot_in_static_part(look.part, writer.member % BUCKET_PARTS, key, own) : -1;
    const u32 who = writer.tile_ballot(in_part >= 0);
    const int found = __shfl_sync(FULL_WARP, static_cast<int>(bucket * SLOTS) + in_part, first + (who ? __ffs(who) - 1 : 0));
    look.slot = who ? found : -1;
    const u32 here = ~(side == 0 ? look.occupied[0] : look.occupied[1]) & FULL_BUCKET,
              there = ~(side == 0 ? look.occupied[1] : look.occupied[0]) & FULL_BUCKET;
    const int first_here = static_cast<int>(side * SLOTS) + __ffs(here) - 1,
              first_there = static_cast<int>((1 - side) * SLOTS) + __ffs(there) - 1;
    look.empty = here ? first_here : there ? first_there : -1;
    return look;
}

// Where a key stands, or would stand.
struct Place {
    u32 bucket;  // of its side, in the pair
    u32 steps;   // from its home
    bool resident, exists;
};

// Walk from a key's home to its place; for whole warps. The tile owns the home, else what is found may be wrong.
__device__ __forceinline__ Place find_place(const Table& table, const Writer& home, u32 bucket, u32 step, i64 key, bool asked,
                                            bool admits) {
    Place place{bucket, 0, false, false};
    bool looks = asked, may_be_further = true;
    const u32 side = bucket % 2;
#pragma unroll 1
    for (u32 steps = 0; __any_sync(FULL_WARP, looks); ++steps) {
        const Writer there(table, bucket / 2);
        const Look look = look_at(there, key, side, looks);
        const u32 gone = __shfl_sync(FULL_WARP, look.part.y, home.tile * TILE + side * BUCKET_PARTS);
        if (looks) {
            const bool resident = may_be_further && look.slot >= 0;
            if (resident || (admits && !place.exists && look.empty >= 0)) place = Place{bucket, steps, resident, true};
            may_be_further = may_be_further && gone;
            looks = !resident && (may_be_further || (admits && !place.exists)) && steps + 1 < table.pairs;
            bucket = next_bucket(bucket, step, table.pairs);
        }
    }
    return place;
}

// Add to the count of keys that have gone in every bucket that a key passed; for one lane.
__device__ __forceinline__ void count_gone(const Table& table, u32 bucket, u32 step, u32 steps, int by) {
    for (u32 i = 0; i < steps; ++i) {
        u32* const gone = gone_at(table.buckets + static_cast<u64>(bucket) * BUCKET_PARTS);
        for (u32 copy = 0; copy < copies_of(table); ++copy) {
            add_to(reinterpret_cast<u32*>(reinterpret_cast<u64>(gone) + copy * copy_bytes(table)), static_cast<u32>(by));
        }
        bucket = next_bucket(bucket, step, table.pairs);
    }
}

// Whether it is a tile's turn to own pairs.
__device__ __forceinline__ bool has_turn(u32 tile, u32 attempt) {
    return attempt == 0 || attempt % TILES == tile;
}

__device__ __forceinline__ void rest(u32 attempt) {
    back_off((attempt + (blockIdx.x * blockDim.x + threadIdx.x) / 32 * 5) % 7);
}

// Write the vectors of up to 4 keys, one a tile of 8 lanes; for whole warps. `pending` marks the tiles that have a key.
__device__ __forceinline__ void write_keys(const Table& table, u32 mode, i64 key, bool pending, const Piece* vector, u32 pieces,
                                           Admissions& counts) {
    constexpr u32 ROW_LOADS = HPS_ROW_LOADS;
    const u32 home = pending ? home_in(table, key) : 0, side = home % 2, step = step_of(key, table.pairs);
    Writer writer(table, home / 2);
    const u32 tile = writer.tile, member = writer.member;
    Piece value[ROW_LOADS];
#pragma unroll
    for (u32 r = 0; r < ROW_LOADS; ++r) {
        if (pending && r * TILE + member < pieces) value[r] = stream_in(vector + r * TILE + member);
    }
    const bool admits = mode & ADMIT;
    if (!admits) pending = find_place(table, writer, home, step, key, pending, false).resident;  // own no pair in vain

#pragma unroll 1
    for (u32 attempt = 0; __any_sync(FULL_WARP, pending); ++attempt) {
        const bool own = writer.take(pending && has_turn(tile, attempt), attempt);
        if (!__any_sync(FULL_WARP, own)) {
            rest(attempt);
            continue;
        }
        __syncwarp();
        fence();
        const Place place = find_place(table, writer, home, step, key, own, admits);
        Writer there(table, place.bucket / 2);
        const bool elsewhere = own && place.exists && place.steps != 0;
        const bool both = there.take_or_leave(elsewhere);
        __syncwarp();
        fence();
        const bool ready = own && place.exists && (both || !elsewhere);
        const Look look = look_at(there, key, side, ready);
        const int slot = place.resident ? look.slot : look.empty;
        const bool writes = ready && slot >= 0;
        if (writes && !place.resident) {
            const u32 bucket = member / BUCKET_PARTS, target = slot / SLOTS, at = slot % SLOTS;
            if (member % BUCKET_PARTS == 0 && bucket == target) {
                there.put(key_at(there.bucket(target), at), key);
                there.put(occupied_at(there.bucket(target)),
                          static_cast<u8>((target == 0 ? look.occupied[0] : look.occupied[1]) | 1u << at));
                count_gone(table, home, step, place.steps, 1);
                atomicAdd(&counts.admitted, 1);
            } else if (member % BUCKET_PARTS == 0 && target != side) {
                there.put(strays_at(there.bucket(side)), static_cast<u8>((look.part.x >> 24) + 1));
            }
        }
        if (writes) {
            const u64 row = static_cast<u64>(place.bucket / 2) * (2 * SLOTS) + slot;
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
        there.give_back(both, writes);
        writer.give_back(own, writes && !elsewhere);
        if (own && !place.exists && admits && member == 0) atomicAdd(&counts.unplaced, 1);
        if (writes || (own && !place.exists)) pending = false;
        if (__any_sync(FULL_WARP, pending)) rest(attempt);
    }
}

// Make up to 4 keys non-resident, one a tile of 8 lanes; for whole warps.
__device__ __forceinline__ void erase_keys(const Table& table, i64 key, bool pending) {
    const u32 home = pending ? home_in(table, key) : 0, side = home % 2, step = step_of(key, table.pairs);
    Writer writer(table, home / 2);
    const u32 tile = writer.tile, member = writer.member;
    pending = find_place(table, writer, home, step, key, pending, false).resident;

#pragma unroll 1
    for (u32 attempt = 0; __any_sync(FULL_WARP, pending); ++attempt) {
        const bool own = writer.take(pending && has_turn(tile, attempt), attempt);
        if (!__any_sync(FULL_WARP, own)) {
            rest(attempt);
            continue;
        }
        __syncwarp();
        fence();
        const Place place = find_place(table, writer, home, step, key, own, false);
        Writer there(table, place.bucket / 2);
        const bool elsewhere = own && place.resident && place.steps != 0;
        const bool both = there.take_or_leave(elsewhere);
        __syncwarp();
        fence();
        const bool ready = own && place.resident && (both || !elsewhere);
        const Look look = look_at(there, key, side, ready);
        const bool writes = ready && look.slot >= 0;
        if (writes && member % BUCKET_PARTS == 0) {
            const u32 bucket = member / BUCKET_PARTS, target = look.slot / SLOTS, at = look.slot % SLOTS;
            if (bucket == target) {
                there.put(occupied_at(there.bucket(target)),
                          static_cast<u8>((target == 0 ? look.occupied[0] : look.occupied[1]) & ~(1u << at)));
                count_gone(table, home, step, place.steps, -1);
                add_to(table.counters + 2, 1ull);
            } else if (target != side) {
                there.put(strays_at(there.bucket(side)), static_cast<u8>((look.part.x >> 24) - 1));
            }
        }
        there.give_back(both, writes);
        writer.give_back(own, writes && !elsewhere);
        if (writes || (own && !place.resident)) pending = false;
        if (__any_sync(FULL_WARP, pending)) rest(attempt);
    }
}

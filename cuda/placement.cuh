// How a key of a static table finds its place; pasted after static_tables.cuh and writer.cuh, where admission.cuh stands for
// other tables.
//
// A key is replaced where it is resident, else it takes an empty slot of its home, else one of its other bucket. A writer of a key
// owns the pair of its home meanwhile, so the key does not move, and the other pair too if it stands or goes there. A tile that
// cannot own that pair at once releases both and retries. That terminates: the tiles of a warp, which run in step, then take
// turns, and warps rest for different times.
// Where both buckets are full, and owned, a key of one of them moves to that key's own other place, home before away; if all of
// those places are full, too, a key of one of them moves to its own other place first. The new key takes the slot at once: tiles
// that made room first, and came back for it later, took it from each other for good. If no key of those may move either, the new
// key has no place. Keys that go home when they can are what keeps a table from filling with strays while keys come and go.

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

// What the lanes of a tile know of a bucket.
struct Look {
    u32 word;   // the first of its header
    int slot;   // that holds the key, or -1
    int empty;  // the first empty one, or -1
};

// Look for a key in a bucket of a writer's pair; for whole warps.
__device__ __forceinline__ Look look_at(const Writer& writer, u32 bucket, i64 key, bool asked) {
    const uint4 part = writer.load(asked);
    const u32 side = bucket % 2, first = writer.tile * TILE;
    Look look;
    look.word = __shfl_sync(FULL_WARP, part.x, first + side * BUCKET_PARTS);
    const u32 occupied = occupied_of(look.word);
    const bool holds = asked && writer.member / BUCKET_PARTS == side;
    const int in_part = holds ? slot_in_static_part(part, writer.member % BUCKET_PARTS, key, occupied) : -1;
    const u32 who = writer.tile_ballot(in_part >= 0);
    const int found = __shfl_sync(FULL_WARP, in_part, first + (who ? __ffs(who) - 1 : 0));
    look.slot = who ? found : -1;
    look.empty = __ffs(~occupied & FULL_BUCKET) - 1;
    return look;
}

// Where a key stands, or would stand.
struct Place {
    Look at_home, there;
    bool resident;
    bool elsewhere;  // in the other bucket
};

// Look for a key in both of its buckets; for whole warps. The tile owns the home, else what is found may be wrong.
__device__ __forceinline__ Place find_place(const Writer& home_writer, const Writer& other_writer, u32 home, i64 key, bool asked,
                                            bool admits) {
    Place place;
    place.at_home = look_at(home_writer, home, key, asked);
    const bool strayed = asked && place.at_home.slot < 0 && strays_of(place.at_home.word);
    acquire();
    place.there = look_at(other_writer, home, key, strayed);  // the other bucket has the side of the home
    const bool is_there = strayed && place.there.slot >= 0;
    place.resident = is_there || (asked && place.at_home.slot >= 0);
    place.elsewhere = is_there || (asked && admits && !place.resident && place.at_home.empty < 0);
    return place;
}

// Whether a key may be resident, seen by a tile that owns nothing: not, if it is nowhere and did not move (static_tables.cuh).
__device__ __forceinline__ bool may_be_resident(const Writer& home_writer, const Writer& other_writer, u32 home, i64 key, bool asked) {
    const Place place = find_place(home_writer, other_writer, home, key, asked, false);
    acquire();
    const bool at_home = look_at(home_writer, home, key, asked).slot >= 0;
    acquire();
    return asked && (place.resident || at_home || has_changed(home_writer.bucket(home % 2), place.at_home.word));
}

// Store what a bucket's header says of its keys, for the lane that does; its pair is owned.
__device__ __forceinline__ void put_header(const Writer& writer, u32 bucket, u32 occupied, u32 strays) {
    writer.put(reinterpret_cast<u16*>(writer.bucket(bucket % 2)) + 1, static_cast<u16>(strays << 8 | occupied));
}

__device__ __forceinline__ u32 more_strays(u32 word) {
    return min(strays_of(word) + 1, MOST_STRAYS);
}

__device__ __forceinline__ u32 fewer_strays(u32 word) {
    return strays_of(word) == MOST_STRAYS ? MOST_STRAYS : strays_of(word) - 1;
}

__device__ __forceinline__ void admit(const Writer& writer, u32 bucket, u32 word, u32 slot, i64 key, u32 strays) {
    writer.put(key_at(writer.bucket(bucket % 2), slot), key);
    put_header(writer, bucket, occupied_of(word) | 1u << slot, strays);
}

__device__ __forceinline__ void evict(const Writer& writer, u32 bucket, u32 word, u32 slot, u32 strays) {
    put_header(writer, bucket, occupied_of(word) & ~(1u << slot), strays);
}

__device__ __forceinline__ Piece* row_of(const Table& table, u32 bucket, u32 slot, u32 pieces) {
    return reinterpret_cast<Piece*>(table.rows) + (static_cast<u64>(bucket) * SLOTS + slot) * pieces;
}

// Whether it is a tile's turn to own pairs.
__device__ __forceinline__ bool has_turn(u32 tile, u32 attempt) {
    return attempt == 0 || attempt % TILES == tile;
}

// Wait before the next attempt, for whole warps: for a time that differs from one warp and attempt to the next, since warps that
// rested alike refused each other their pairs for ever. Who owns nothing waits the longer the more attempts have failed: many that
// ask for a few pairs all the time keep them from each other.
__device__ __forceinline__ void rest(u32 attempt, const Writer& writer) {
    const u32 most = __any_sync(FULL_WARP, writer.held) ? 0 : min(attempt / 8, 9u);
    u32 random = (static_cast<u32>(clock64()) ^ (blockIdx.x * blockDim.x + threadIdx.x) / 32 * 0x9e3779b9u) * 0x85ebca6bu;
    random = __shfl_sync(FULL_WARP, random ^ random >> 15, 0);
    __nanosleep(random % (1024u << most));
}

// Of a key that stands in a bucket, the bucket where it might stand instead.
__device__ __forceinline__ u32 bucket_beyond(const Table& table, u32 bucket, i64 key) {
    const u32 home = home_in(table, key);
    return home == bucket ? other_bucket(home, key, table.pairs) : home;
}

// A key that may go from a bucket to its own other place, `target`.
struct Move {
    i64 key;
    u32 bucket, target;
    bool exists;
};

// Choose a key of one of two buckets of the same side, home before away; for whole warps. Who owns neither may find what is gone.
__device__ __noinline__ Move choose_move(const Table& table, u32 one, u32 two, bool wants) {
    const u32 lane = threadIdx.x % 32, member = lane % TILE, first = lane - member;
    i64 keys[2] = {0, 0};
    u32 targets[2] = {one, two}, may = 0, home = 0;
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {
        const u32 bucket = i ? two : one;
        bool goes = false, goes_home = false;
        if (wants && member < SLOTS) {
            uint4* const leading = Writer(table, bucket / 2).bucket(bucket % 2);
            keys[i] = static_cast<i64>(load_word(key_at(leading, member)));
            targets[i] = bucket_beyond(table, bucket, keys[i]);
            const u32 there = occupied_of(static_cast<u32>(load_word(table.buckets + static_cast<u64>(targets[i]) * BUCKET_PARTS)));
            goes = there != FULL_BUCKET && occupied_of(static_cast<u32>(load_word(leading))) >> member & 1;
            goes_home = goes && home_in(table, keys[i]) == targets[i];
        }
        may |= (__ballot_sync(FULL_WARP, goes) >> first & 0xff) << (TILE * i);
        home |= (__ballot_sync(FULL_WARP, goes_home) >> first & 0xff) << (TILE * i);
    }
    const u32 who = home ? home : may, chosen = who ? __ffs(who) - 1 : 0;
    Move move;
    move.key = __shfl_sync(FULL_WARP, chosen < TILE ? keys[0] : keys[1], first + chosen % TILE);
    move.target = __shfl_sync(FULL_WARP, chosen < TILE ? targets[0] : targets[1], first + chosen % TILE);
    move.bucket = chosen < TILE ? one : two;
    move.exists = who != 0;
    return move;
}

// Make a move, unless what was chosen has changed; for whole warps, of tiles that own both pairs. Whether it was made: then the
// bucket has an empty slot.
__device__ __noinline__ bool move_key(const Table& table, const Move& move, bool both, u32 pieces) {
    const u32 member = threadIdx.x % TILE;
    const Writer from(table, move.bucket / 2), to(table, move.target / 2);
    const Look here = look_at(from, move.bucket, move.key, both), there = look_at(to, move.target, move.key, both);
    const bool moves = both && here.slot >= 0 && there.empty >= 0;
    const bool leaves_home = moves && home_in(table, move.key) == move.bucket;
    if (moves) {
        const Piece* const source = row_of(table, move.bucket, here.slot, pieces);
        Piece* const row = row_of(table, move.target, there.empty, pieces);
        for (u32 piece = member; piece < pieces; piece += TILE) store_unit(row + piece, load_unit(source + piece));
        const u32 strays = leaves_home ? strays_of(there.word) : fewer_strays(there.word);
        if (member == 0) admit(to, move.target, there.word, there.empty, move.key, strays);
    }
    __syncwarp();
    fence();
    if (moves && member == 0) {
        evict(from, move.bucket, here.word, here.slot, leaves_home ? more_strays(here.word) : strays_of(here.word));
    }
    __syncwarp();
    fence();  // whatever takes the slot is seen after the eviction
    return moves;
}

// As move_key, of tiles that own the key's pair if `own`, unless another writer keeps its target.
__device__ __forceinline__ bool make_move(const Table& table, const Move& move, bool own, u32 pieces) {
    Writer to(table, move.target / 2);
    const bool both = to.take_or_leave(own);
    __syncwarp();
    fence();
    const bool moves = move_key(table, move, both, pieces);
    to.give_back(both, moves);
    return moves;
}

// Move a key of two full buckets to its own other place, where a key makes room for it; for whole warps, of tiles that own the
// pairs of both if they `want`. False if no key of those places may move; true, too, if other writers kept it from being done.
__device__ __noinline__ bool make_room_beyond(const Table& table, u32 one, u32 two, bool wants, u32 attempt, u32 pieces) {
    bool exists = false, made = false;
#pragma unroll 1
    for (u32 i = 0; i < 2 * SLOTS && __any_sync(FULL_WARP, wants && !made); ++i) {
        const u32 nth = (attempt + i) % (2 * SLOTS), bucket = nth < SLOTS ? one : two;
        const bool asks = wants && !made;
        Move first{0, bucket, bucket, asks};
        if (asks) {
            uint4* const here = table.buckets + static_cast<u64>(bucket) * BUCKET_PARTS;
            first.key = static_cast<i64>(load_word(key_at(here, nth % SLOTS)));
            first.target = bucket_beyond(table, bucket, first.key);
        }
        const bool others = asks && first.target != one && first.target != two;  // those two are full, and owned
        const Move second = choose_move(table, first.target, first.target, others);
        Writer beyond(table, first.target / 2);
        const bool room = others && occupied_of(static_cast<u32>(load_word(beyond.bucket(first.target % 2)))) != FULL_BUCKET;
        const bool own = beyond.take_or_leave(room || second.exists);
        __syncwarp();
        fence();
        const bool makes_room = make_move(table, second, own && second.exists, pieces);
        const bool moves = move_key(table, first, own, pieces);
        beyond.give_back(own, makes_room || moves);
        made = made || moves;
        exists = exists || room || second.exists;
    }
    return exists;
}

// Write the vectors of up to 4 keys, one a tile of 8 lanes; for whole warps. `pending` marks the tiles that have a key.
__device__ __forceinline__ void write_keys(const Table& table, u32 mode, i64 key, bool pending, const Piece* vector, u32 pieces,
                                           Admissions& counts) {
    constexpr u32 ROW_LOADS = HPS_ROW_LOADS;
    const u32 home = pending ? home_in(table, key) : 0, other = other_bucket(home, key, table.pairs);
    Writer writer(table, home / 2), other_writer(table, other / 2);
    const u32 tile = writer.tile, member = writer.member;
    Piece value[ROW_LOADS];
#pragma unroll
    for (u32 r = 0; r < ROW_LOADS; ++r) {
        if (pending && r * TILE + member < pieces) value[r] = stream_in(vector + r * TILE + member);
    }
    const bool admits = mode & ADMIT;
    if (!admits) pending = may_be_resident(writer, other_writer, home, key, pending);  // own no pair in vain

#pragma unroll 1
    for (u32 attempt = 0; __any_sync(FULL_WARP, pending); ++attempt) {
        const bool own = writer.take(pending && has_turn(tile, attempt), attempt);
        if (!__any_sync(FULL_WARP, own)) {
            rest(attempt, writer);
            continue;
        }
        __syncwarp();
        fence();
        Place place = find_place(writer, other_writer, home, key, own, admits);
        const bool both = other_writer.take_or_leave(place.elsewhere);
        if (__any_sync(FULL_WARP, both)) {
            __syncwarp();
            fence();
            const Look again = look_at(other_writer, other, key, both);
            if (both) place.there = again;
        }
        bool elsewhere = place.elsewhere;
        const bool ready = own && (place.resident || admits) && (both || !elsewhere);
        const bool full = ready && !place.resident && place.at_home.empty < 0 && place.there.empty < 0;
        bool unplaced = false;
        if (__any_sync(FULL_WARP, full)) {
            const Move move = choose_move(table, home, other, full);
            make_move(table, move, full && move.exists, pieces);
            unplaced = full && !move.exists;
            if (__any_sync(FULL_WARP, unplaced)) {
                unplaced = !make_room_beyond(table, home, other, unplaced, attempt, pieces) && unplaced;
            }
            const Look at_home = look_at(writer, home, key, full), there = look_at(other_writer, other, key, full);
            if (full) {
                place.at_home = at_home;
                place.there = there;
                elsewhere = at_home.empty < 0;
            }
        }
        const Look& look = elsewhere ? place.there : place.at_home;
        const int slot = place.resident ? look.slot : look.empty;
        const bool writes = ready && slot >= 0;
        if (writes && !place.resident && member == 0) {
            admit(elsewhere ? other_writer : writer, home, look.word, slot, key, strays_of(look.word));
            if (elsewhere) put_header(writer, home, occupied_of(place.at_home.word), more_strays(place.at_home.word));
            atomicAdd(&counts.admitted, 1);
        }
        if (writes) {
            Piece* const to = row_of(table, elsewhere ? other : home, slot, pieces);
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
        other_writer.give_back(both, writes);
        writer.give_back(own, writes && !elsewhere);
        if (unplaced && member == 0) atomicAdd(&counts.unplaced, 1);
        if (writes || unplaced || (own && !place.resident && !admits)) pending = false;
        if (__any_sync(FULL_WARP, pending)) rest(attempt, writer);
    }
}

// Make up to 4 keys non-resident, one a tile of 8 lanes; for whole warps.
__device__ __forceinline__ void erase_keys(const Table& table, i64 key, bool pending) {
    const u32 home = pending ? home_in(table, key) : 0, other = other_bucket(home, key, table.pairs);
    Writer writer(table, home / 2), other_writer(table, other / 2);
    const u32 tile = writer.tile, member = writer.member;
    pending = may_be_resident(writer, other_writer, home, key, pending);

#pragma unroll 1
    for (u32 attempt = 0; __any_sync(FULL_WARP, pending); ++attempt) {
        const bool own = writer.take(pending && has_turn(tile, attempt), attempt);
        if (!__any_sync(FULL_WARP, own)) {
            rest(attempt, writer);
            continue;
        }
        __syncwarp();
        fence();
        Place place = find_place(writer, other_writer, home, key, own, false);
        const bool both = other_writer.take_or_leave(place.elsewhere);
        if (__any_sync(FULL_WARP, both)) {
            __syncwarp();
            fence();
            const Look again = look_at(other_writer, other, key, both);
            if (both) place.there = again;
        }
        const bool elsewhere = place.elsewhere;
        const Look& look = elsewhere ? place.there : place.at_home;
        const bool writes = look.slot >= 0 && (both || !elsewhere);
        if (writes && member == 0) {
            evict(elsewhere ? other_writer : writer, home, look.word, look.slot, strays_of(look.word));
            if (elsewhere) put_header(writer, home, occupied_of(place.at_home.word), fewer_strays(place.at_home.word));
            add_to(table.counters + 2, 1ull);
        }
        other_writer.give_back(both, writes);
        writer.give_back(own, writes && !elsewhere);
        if (writes || (own && !place.resident)) pending = false;
        if (__any_sync(FULL_WARP, pending)) rest(attempt, writer);
    }
}

// How a kernel that changes a table owns a pair of buckets; pasted after sharing.cuh. A TILE of 8 lanes works on one
// key and holds its pair, a part a lane: members 0 to 3 bucket 0, members 4 to 7 bucket 1.
//
// A tile owns a pair when it has found the lowest bit of both versions clear and set it. It asks for both at once first; from
// then on it asks for bucket 1 only while it has bucket 0, and gives back a bucket 1 that it got alone. So nobody holds bucket
// 1 and waits, whoever holds bucket 0 gets bucket 1, and the tiles of a warp, which go in step, cannot hold each other up. A
// pair that is owned is given back before the warp tries again.
// Of a shared table, a tile holds the leading copy of its pair, and `put` writes to all.

constexpr u32 TILE = 8;
constexpr u32 TILES = 32 / TILE;

struct Writer {
    u32 tile, member;
    uint4* pair;
    u32 held;     // bit b: bucket b
    u32 version;  // of the bucket whose header the lane holds (members 0 and 4), when it was taken
    u32 copies;   // of the pair
    u32 leading;  // which of them `pair` is
    u64 distance;  // bytes from one copy to the next

    __device__ __forceinline__ Writer(const Table& table, u32 of_pair)
        : tile(threadIdx.x % 32 / TILE), member(threadIdx.x % TILE), held(0), version(0), copies(copies_of(table)),
          leading(HPS_SHARED ? leading_copy(table, of_pair) : 0), distance(HPS_SHARED ? copy_bytes(table) : 0) {
        pair = reinterpret_cast<uint4*>(reinterpret_cast<u64>(table.buckets + static_cast<u64>(of_pair) * PAIR_PARTS) + leading * distance);
    }

    // The place of something of the leading copy in another copy.
    template <typename T>
    __device__ __forceinline__ T* in_copy(T* at, u32 copy) const {
        return reinterpret_cast<T*>(reinterpret_cast<u64>(at) + (static_cast<i64>(copy) - leading) * static_cast<i64>(distance));
    }

    // Store something in all copies of a pair: of an owned one, or its scores; `at` is its place in the leading copy.
    template <typename T>
    __device__ __forceinline__ void put(T* at, T value) const {
#if HPS_SHARED
        for (u32 copy = 0; copy < copies; ++copy) *static_cast<volatile T*>(in_copy(at, copy)) = value;
#else
        *static_cast<volatile T*>(at) = value;
#endif
    }

    __device__ __forceinline__ u32 tile_ballot(bool yes) const {
        return __ballot_sync(FULL_WARP, yes) >> (tile * TILE) & 0xff;
    }

    // Try to own the pair; for whole warps. Whether the tile owns it, which only a tile that `wants` to can.
    __device__ __forceinline__ bool take(bool wants, u32 attempt) {
        const u32 bucket = member / BUCKET_PARTS;
        const bool asks = wants && member % BUCKET_PARTS == 0 && !(held >> bucket & 1) && (bucket == 0 || attempt == 0 || held);
        u32 word = 1;
        if (asks) word = fetch_or(reinterpret_cast<u32*>(pair + member), 1u);
        const bool got = asks && (word & 1) == 0;
        if (got) version = word & 0xffff;
        const u32 who = tile_ballot(got);
        held |= (who & 1) | (who >> 3 & 2);
        if (held == 2) {
            if (member == 4) store_version(version);
            held = 0;
        }
        if (HPS_SHARED && held == 3 && member % BUCKET_PARTS == 0) put_version_of_others(version | 1);
        return held == 3;
    }

    // Own the pair if that takes no wait; for whole warps. Whether the tile owns it.
    __device__ __forceinline__ bool take_or_leave(bool wants) {
        const bool own = take(wants, 0);
        if (held == 1) {
            if (member == 0) store_version(version);
            held = 0;
        }
        return own;
    }

    // Give the pair back, after the writes of all lanes; for whole warps. `owned` tells tiles that own theirs.
    __device__ __forceinline__ void give_back(bool owned, bool changed) {
        __syncwarp();
        fence();
        if (HPS_SHARED) {  // the leading copy last: then another may own the pair
            if (owned && member % BUCKET_PARTS == 0) put_version_of_others(changed ? version + 2 : version);
            fence();
        }
        if (owned) {
            if (member % BUCKET_PARTS == 0) store_version(changed ? version + 2 : version);
            held = 0;
        }
    }

    // Which of the 14 slots of the pair holds a key, or -1; for whole warps.
    __device__ __forceinline__ int find(const uint4& part, i64 key, bool asked) const {
        const int in_part = slot_in_part(part, member % BUCKET_PARTS, key);
        const u32 who = tile_ballot(asked && in_part >= 0);
        const int slot = member / BUCKET_PARTS * SLOTS + in_part;
        const int found = __shfl_sync(FULL_WARP, slot, tile * TILE + (who ? __ffs(who) - 1 : 0));
        return who ? found : -1;
    }

    // Whether a tile owns a bucket of the pair, by its parts; for whole warps.
    __device__ __forceinline__ bool is_owned(const uint4& part) const {
        return tile_ballot(member % BUCKET_PARTS == 0 && part.x & 1);
    }

    __device__ __forceinline__ uint4 load(bool asked) const {
        return asked ? load_part(pair + member) : make_uint4(0, 0, 0, 0);
    }

    __device__ __forceinline__ uint4* bucket(u32 b) const {
        return pair + b * BUCKET_PARTS;
    }

    __device__ __forceinline__ void store_version(u32 value) const {
        *reinterpret_cast<volatile u16*>(pair + member) = static_cast<u16>(value);
    }

    __device__ __forceinline__ void put_version_of_others(u32 value) const {
        for (u32 copy = 0; copy < copies; ++copy) {
            if (copy != leading) *reinterpret_cast<volatile u16*>(in_copy(pair + member, copy)) = static_cast<u16>(value);
        }
    }

    // Take scores as they are in the copy where they are highest; for the lanes that hold a header of their pair.
    __device__ __forceinline__ void gather_scores(uint4& part, bool asked) const {
#if HPS_SHARED
        if (!asked || member % BUCKET_PARTS != 0) return;
        for (u32 copy = 0; copy < copies; ++copy) {
            if (copy != leading) {
                part.y = larger_scores(part.y, *static_cast<volatile u32*>(scores_at(in_copy(pair + member, copy))));
            }
        }
#endif
    }
};

__device__ __forceinline__ void back_off(u32 attempt) {
    __nanosleep(32u << min(attempt, 5u));
}

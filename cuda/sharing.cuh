// Tables that several devices of a process share; pasted after embedding_cache.cuh. Their kernels are compiled with HPS_SHARED.
//
// A row lies on one device, by its pair: the first device has the rows of the first pairs, and so on. All rows are one range of
// addresses, which every device reads. The buckets lie on every device, so that a query reads nothing but rows, and those of its
// neighbours, across the link. The copies of the buckets are one range of addresses, too, a constant distance apart.
//
// The copy on the device that has the rows of a pair is its LEADING copy. Whoever owns the pair there owns it everywhere, and
// writes to all copies: their versions become odd before anything else changes, on the leading copy last of all even again. So
// what embedding_cache.cuh says of torn vectors holds for every copy: a query that read a byte of what was written after its own
// copy's version became odd sees that version or a later one, since fences and accesses have the scope of the system.
// A hit raises the score in the copy of its own device. Whoever changes scores takes the highest of all copies as the present one.
//
// NEAR TABLES. A device may have a table of its own beside, for the most used rows of its neighbours. A query looks there first
// for keys of their pairs. It notes some of the keys that it found at neighbours as SAMPLES, and promote.cu admits them to the
// near table. Changes to resident rows are followed by an erasure of their copies, and promote.cu does not run meanwhile.

struct Sharing {          // in the 256 bytes before each copy of the buckets
    uint4* near_buckets;  // of the device's near table
    const u8* near_rows;
    i64* samples;         // (sample_room,) keys
    u64* sample_count;    // that were noted since promote.cu ran last, also those that found no room
    u32 near_pairs;       // 0: there is no near table
    u32 near_stretch;     // see home_in
    u32 first_pair, pairs;  // whose rows lie on this device
    u32 sample_room;
    u32 padding;
};

static_assert(sizeof(Sharing) == 56, "hps/cache/cuda/kernels.py packs this");

#define HPS_NEAR (HPS_SHARED && !HPS_STATIC)  // static tables hold every row, and have no near table

constexpr u32 SAMPLED_OF = 32;            // one of as many warps notes keys
constexpr u32 NEAR_ROW = 0x80000000u;     // marks row numbers of the near table
constexpr u64 COPY_GRANULE = 1ull << 21;  // bytes; the distance of copies is a multiple

__device__ __forceinline__ const Sharing& sharing_of(const uint4* own_copy) {
    return *reinterpret_cast<const Sharing*>(own_copy - 16);
}

// What a query knows of its near table, and of the pairs whose rows lie on its device.
struct Near {
    uint4* buckets;
    const u8* rows;
    u32 pairs, stretch;
    u32 first_own, own_pairs;

    __device__ __forceinline__ bool may_have(u32 pair) const volatile { return pairs && pair - first_own >= own_pairs; }
};

__device__ __forceinline__ Near near_of_copy(const uint4* own_copy) {
    const Sharing& sharing = sharing_of(own_copy);
    return Near{sharing.near_buckets, sharing.near_rows, sharing.near_pairs, sharing.near_stretch, sharing.first_pair, sharing.pairs};
}

// As home_in, of the near table.
__device__ __forceinline__ u32 near_home_of(const volatile Near& near, i64 key) {
    return __umulhi(static_cast<u32>(mix(key) >> 32) * near.stretch, 2 * near.pairs);
}

// Table.sharing: 4 bits of stretch, 4 bits of the number of copies, above the granules from one to the next.
__device__ __forceinline__ u32 copies_of(const Table& table) { return HPS_SHARED ? table.sharing >> 4 & 15 : 1; }

__device__ __forceinline__ u64 copy_bytes(const Table& table) { return (table.sharing >> 8) * COPY_GRANULE; }

__device__ __forceinline__ u32 leading_copy(const Table& table, u32 pair) {
    const u32 each = (table.pairs + copies_of(table) - 1) / copies_of(table);
    return pair / each;
}

// The larger of each two scores.
__device__ __forceinline__ u32 larger_scores(u32 one, u32 other) {
    return __vmaxu4(one & 0x0f0f0f0f, other & 0x0f0f0f0f) | __vmaxu4(one >> 4 & 0x0f0f0f0f, other >> 4 & 0x0f0f0f0f) << 4;
}

// Whether a warp notes keys, by chance; for whole warps.
__device__ __forceinline__ bool is_sampled(u32 warp) {
    return __shfl_sync(FULL_WARP, static_cast<u32>(clock()) >> 5, 0) % SAMPLED_OF == warp;
}

// Note the lanes' keys for the near table; for whole warps.
__device__ __forceinline__ void note_samples(const Sharing& sharing, i64 key, bool notes, u32 lane) {
    const u32 who = __ballot_sync(FULL_WARP, notes);
    if (!who) return;
    u32 to = 0;
    if (lane == 0) to = static_cast<u32>(atomicAdd(sharing.sample_count, static_cast<u64>(__popc(who))));
    to = __shfl_sync(FULL_WARP, to, 0) + __popc(who & ((1u << lane) - 1));
    if (notes && to < sharing.sample_room) sharing.samples[to] = key;
}

// Static tables, which hold every row of theirs; pasted after embedding_cache.cuh. Kernels for them are compiled with HPS_STATIC.
//
// THE WALK. A static table evicts nothing: a key that finds both buckets of its pair full goes on to other pairs, a step of its
// own apart, until one has an empty slot. Their number is odd and steps are powers of two, so a walk comes to every pair. On its
// way the key keeps the side that its home has: in each pair it first looks at that bucket, then at the neighbour.
//
// THE HEADER of a bucket tells what a walk needs, in place of what only evictions need:
//     byte  2       occupied: bit s tells that slot s holds a key. Whatever an empty slot holds is no key: fillers, which are keys
//                   of other pairs, would be found by a key that walks
//     bytes 4..7    gone, uint32: keys that came to this bucket, at home or on their way, and went on to another pair
// strays counts the keys that came to this bucket and stand in its neighbour. So a query whose key is not in a bucket reads the
// neighbour only if it has strays, and the next pair only if keys have gone.
//
// A MISS NEEDS NO SECOND LOOK. Keys do not move between slots. A key that is resident throughout a query is found: its slot, the
// bit of its slot, and a count above 0 of strays or gone in every bucket that its walk passes are there throughout. What one
// query sees of a bucket's header is one word of memory for version, bits and strays, so it is of one moment.

#ifndef HPS_STATIC
#define HPS_STATIC 0
#endif

constexpr u32 FULL_BUCKET = (1u << SLOTS) - 1;
// Of a table's counters, after the keys admitted, evicted and erased: the keys that found no place; the absent keys of lookups
// that nobody waits for, and those of them that could not be read; whether the table is complete, that is, holds every row.
constexpr u32 UNPLACED = 3, ABSENT_KEYS = 4, UNREAD_KEYS = 5, COMPLETE = 6;

__device__ __forceinline__ u32 occupied_of(u32 word) {
    return word >> 16 & FULL_BUCKET;
}

// By how many pairs a key goes on; pairs is odd.
__device__ __forceinline__ u32 step_of(i64 key, u32 pairs) {
    return 1u << __umulhi(static_cast<u32>(mix(key)), 32 - __clz(pairs));
}

// The bucket of the next pair that a key comes to; `bucket` is one that it came to.
__device__ __forceinline__ u32 next_bucket(u32 bucket, u32 step, u32 pairs) {
    const u32 next = bucket + 2 * step;
    return next >= 2 * pairs ? next - 2 * pairs : next;
}

__device__ __forceinline__ u32* gone_at(uint4* bucket) {
    return reinterpret_cast<u32*>(bucket) + 1;
}

__device__ __forceinline__ u8* occupied_at(uint4* bucket) {
    return reinterpret_cast<u8*>(bucket) + 2;
}

// As slot_in_part, of the slots that hold keys.
__device__ __forceinline__ int slot_in_static_part(const uint4& part, u32 member, i64 key, u32 occupied) {
    int slot = -1;
    if (member != 0 && key_of(part.x, part.y) == key && occupied >> (2 * member - 1) & 1) slot = 2 * member - 1;
    if (key_of(part.z, part.w) == key && occupied >> (2 * member) & 1) slot = 2 * member;
    return slot;
}

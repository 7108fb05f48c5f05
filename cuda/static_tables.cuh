// Static tables, which hold every row of theirs; pasted after embedding_cache.cuh. Kernels for them are compiled with HPS_STATIC.
//
// TWO BUCKETS. A key stands in its home or in its OTHER bucket, one of another pair that the hash chooses, too. A static table
// evicts nothing: where both are full, a key in one of them moves to its own other place (placement.cuh), which finds places for
// 0.86 of all slots with one key in eight not at home.
//
// THE HEADER of a bucket tells what a query needs, in place of what only evictions need:
//     byte  2       occupied: bit s tells that slot s holds a key. Whatever an empty slot holds is no key
//     byte  3       strays, uint8: keys whose home is this bucket and that stand in their other one; 255 may be any number
//     bytes 4..7    nothing
// So a query whose key is not at home reads the other bucket only if the home has strays.
//
// NO MISS OF A RESIDENT KEY. A key moves while both of its pairs are owned: first it is put where it goes to, then it leaves where
// it was, with a fence between. A query that found its key nowhere reads the home's keys again, and then the first word of its
// header, with an acquire fence before each. If that word was even, and is the same, nobody owned the bucket from the first look at
// it to the last, so no key of this home moved: the key would stand at home, where the second look would have found it, or in the
// other bucket, and the home would have strays. (An odd word may be the same though a key left home: where the count of strays is
// 255 and another key took the slot before the bucket was given back.)

#ifndef HPS_STATIC
#define HPS_STATIC 0
#endif

constexpr u32 FULL_BUCKET = (1u << SLOTS) - 1, MOST_STRAYS = 255;
// Of a table's counters, after the keys admitted, evicted and erased: the keys that found no place; the absent keys of lookups
// that nobody waits for, and those of them that could not be read; whether the table is complete, that is, holds every row.
constexpr u32 UNPLACED = 3, ABSENT_KEYS = 4, UNREAD_KEYS = 5, COMPLETE = 6;

__device__ __forceinline__ u32 occupied_of(u32 word) {
    return word >> 16 & FULL_BUCKET;
}

__device__ __forceinline__ u32 strays_of(u32 word) {
    return word >> 24;
}

// Whether a writer may have owned a bucket since the first word of its header was loaded.
__device__ __forceinline__ bool has_changed(const uint4* bucket, u32 word) {
    return (word & 1) || static_cast<u32>(load_word(bucket)) != word;
}

// Where a key may stand that is not at home: of a static table a bucket of the same side of another pair, else the neighbour.
__device__ __forceinline__ u32 other_bucket(u32 home, i64 key, u32 pairs) {
#if HPS_STATIC
    const u32 other = home + 2 + 2 * __umulhi(static_cast<u32>(mix(key)), pairs - 1);
    return other >= 2 * pairs ? other - 2 * pairs : other;
#else
    return home ^ 1;
#endif
}

// As slot_in_part, of the slots that hold keys.
__device__ __forceinline__ int slot_in_static_part(const uint4& part, u32 member, i64 key, u32 occupied) {
    int slot = -1;
    if (member != 0 && key_of(part.x, part.y) == key && occupied >> (2 * member - 1) & 1) slot = 2 * member - 1;
    if (key_of(part.z, part.w) == key && occupied >> (2 * member) & 1) slot = 2 * member;
    return slot;
}

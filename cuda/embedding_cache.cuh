// Layout and memory operations of the embedding cache, pasted into every kernel (hps/cache/cuda/kernels.py).
//
// A table is an array of PAIRS of BUCKETS, and one row of vectors a slot. A pair is 128 bytes, aligned; a bucket is 64:
//     bytes 0..1     version, uint16: odd while a writer owns the bucket, the next even number after each change
//     byte  2        the lowest 8 bits of the hash of the key that was refused last, uint8 (insert.cu)
//     byte  3        strays, uint8: keys whose home is this bucket and that stand in its neighbour
//     bytes 4..7     scores, 4 bits a slot, from the lowest: an insert into a full bucket evicts the smallest
//     bytes 8..63    7 keys, int64
// The hash of a key gives its HOME bucket. A key whose home is full goes to the neighbour, the other bucket of the pair, while
// that has an empty slot. So a query reads 64 bytes, and the other 64 only if its key is not at home and some key has strayed.
// An empty slot holds the pair's FILLER: a key whose own pair is another one. So every int64 is a legal key, a key compare
// alone says whether a slot answers, and a query never looks at anything that marks empty slots.
// Static tables, which hold every row, have the same buckets with another header: static_tables.cuh.
// Tables that several devices share have a copy of the buckets on each: sharing.cuh.
//
// WHY NO QUERY RETURNS A TORN VECTOR. A writer sets the lowest bit of both versions of a pair with atomic ORs, fences, writes,
// fences, and stores the next even versions. A query reads the bucket, then the row, and only then the version and the slot's
// key again, with an acquire fence after the first and before the last; it keeps the row only if the version is even and as it
// was, and the key still the one it looks for. The second look at the version equals the first, so no writer owned the bucket
// between the two; between the two it has read the row, and has seen that the slot was the key's. (The first look at the keys
// may be older than the first look at the version, which is in another sector of memory: that is why the key is read again.) A
// version of 16 bits repeats after 32,768 changes of one bucket, each of which takes about a microsecond: longer than any read.

#ifndef HPS_UNIT
#define HPS_UNIT 4  // floats a lane moves at once: 4, 2 or 1; divides dim, and rows of `out` are aligned to it
#endif
#ifndef HPS_PIECE
#define HPS_PIECE HPS_UNIT  // words a lane moves at once of a row as it is stored; divides its width
#endif
#ifndef HPS_FORMAL_ORDER
#define HPS_FORMAL_ORDER 0  // 1: a query keeps to the letter of the PTX memory model; see acquire()
#endif
#ifndef HPS_SHARED
#define HPS_SHARED 0  // 1: several devices read and write the table
#endif
#if HPS_SHARED
#define SCOPE "sys"  // of fences, and of loads and stores of what others may be changing
#else
#define SCOPE "gpu"
#endif
#define FULL_WARP 0xffffffffu

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

constexpr u32 SLOTS = 7;         // of a bucket
constexpr u32 BUCKET_PARTS = 4;  // 16-byte parts of a bucket: the header and key 0, then two keys each
constexpr u32 PAIR_PARTS = 8;
constexpr u32 UNIT = HPS_UNIT;

// Scores (benchmarks/results/admission.json compares policies). A hit raises them with an OR, unless they are high enough.
constexpr u32 HIT_SCORE = 8;      // this bit is set by a hit
constexpr u32 TOP_SCORE = 15;     // of a slot that was hit while it had HIT_SCORE
constexpr u32 ENOUGH_SCORE = 12;  // a hit writes nothing from here on
constexpr u32 EMPTY_SCORE = 0;    // of a key that took an empty slot,
constexpr u32 FIRST_SCORE = 1;    // that evicted another,
constexpr u32 AGAIN_SCORE = 4;    // and that did so when it missed for the second time

template <u32 N>
struct alignas(4 * N) Words {
    float value[N];
};
using Unit = Words<HPS_UNIT>;
using Piece = Words<HPS_PIECE>;

// One table's memory.
struct Table {
    uint4* buckets;   // (2 pairs, 4) uint4, 128-byte aligned; of a shared table the first copy
    float* rows;      // (14 pairs, width) words, 256-byte aligned: that of slot s of bucket b is 7 b + s
    u64* counters;    // (3,) uint64: keys admitted, keys evicted, keys erased
    i64 zero_filler;  // the filler of key 0's pair; every other pair's is 0
    u32 zero_pair;    // the pair of key 0
    u32 pairs;        // may be 0: nothing is cached
    u32 width;        // words of a row; dim where rows are float32
    u32 sharing;      // see home_in, and sharing.cuh
};

// The mixing hash of hps/hashing.py (rrxmrrxmsx_0, Pelle Evensen, public domain).
__device__ __forceinline__ u64 mix(i64 key) {
    u64 x = static_cast<u64>(key);
    x ^= ((x >> 25) | (x << 39)) ^ ((x >> 50) | (x << 14));
    x *= 0xA24BAED4963EE407ull;
    x ^= ((x >> 24) | (x << 40)) ^ ((x >> 49) | (x << 15));
    x *= 0x9FB21C651E98DF25ull;
    return x ^ (x >> 28);
}

// The home of a key in a table.
__device__ __forceinline__ u32 home_of(i64 key, u32 pairs) {
    return __umulhi(static_cast<u32>(mix(key) >> 32), 2 * pairs);
}

// Likewise. The keys of a near table (sharing.cuh) come from a part of the hashes alone; its stretch spreads them over all buckets.
__device__ __forceinline__ u32 home_in(const Table& table, i64 key) {
    return __umulhi(static_cast<u32>(mix(key) >> 32) * (table.sharing & 15), 2 * table.pairs);
}

__device__ __forceinline__ i64 filler_of(const Table& table, u32 pair) {
    return pair == table.zero_pair ? table.zero_filler : 0;
}

// The sum of the values of this lane and those before it; for whole warps.
__device__ __forceinline__ u32 sum_to(u32 value, u32 lane) {
#pragma unroll
    for (u32 step = 1; step < 32; step *= 2) {
        const u32 other = __shfl_up_sync(FULL_WARP, value, step);
        if (lane >= step) value += other;
    }
    return value;
}

__device__ __forceinline__ i64 key_of(u32 low, u32 high) {
    return static_cast<i64>(static_cast<u64>(high) << 32 | low);
}

// Loads and stores of memory that others may be changing: relaxed, with the scope of the writers, so never from the incoherent L1
// cache. All are volatile: the compiler keeps them in program order.

__device__ __forceinline__ uint4 load_part(const uint4* at) {
    uint4 v;
    asm volatile("ld.relaxed." SCOPE ".global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(at)
                 : "memory");
    return v;
}

__device__ __forceinline__ u64 load_word(const void* at) {
    u64 v;
    asm volatile("ld.relaxed." SCOPE ".global.u64 %0, [%1];" : "=l"(v) : "l"(at) : "memory");
    return v;
}

template <u32 N>
__device__ __forceinline__ Words<N> load_unit(const Words<N>* at) {
    Words<N> v;
    if constexpr (N == 4) {
        asm volatile("ld.relaxed." SCOPE ".global.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(v.value[0]), "=f"(v.value[1]), "=f"(v.value[2]), "=f"(v.value[3])
                     : "l"(at)
                     : "memory");
    } else if constexpr (N == 2) {
        asm volatile("ld.relaxed." SCOPE ".global.v2.f32 {%0, %1}, [%2];" : "=f"(v.value[0]), "=f"(v.value[1]) : "l"(at) : "memory");
    } else {
        asm volatile("ld.relaxed." SCOPE ".global.f32 %0, [%1];" : "=f"(v.value[0]) : "l"(at) : "memory");
    }
    return v;
}

template <u32 N>
__device__ __forceinline__ void store_unit(Words<N>* at, const Words<N>& v) {
    if constexpr (N == 4) {
        asm volatile("st.relaxed." SCOPE ".global.v4.f32 [%0], {%1, %2, %3, %4};"
                     :
                     : "l"(at), "f"(v.value[0]), "f"(v.value[1]), "f"(v.value[2]), "f"(v.value[3])
                     : "memory");
    } else if constexpr (N == 2) {
        asm volatile("st.relaxed." SCOPE ".global.v2.f32 [%0], {%1, %2};" : : "l"(at), "f"(v.value[0]), "f"(v.value[1]) : "memory");
    } else {
        asm volatile("st.relaxed." SCOPE ".global.f32 [%0], %1;" : : "l"(at), "f"(v.value[0]) : "memory");
    }
}

// To and from the caller's arrays, which no other thread uses: read or written once, so the first to leave the L2 cache.

template <u32 N>
__device__ __forceinline__ Words<N> stream_in(const Words<N>* at) {
    Words<N> v;
    if constexpr (N == 4) {
        asm volatile("ld.global.cs.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(v.value[0]), "=f"(v.value[1]), "=f"(v.value[2]), "=f"(v.value[3])
                     : "l"(at));
    } else if constexpr (N == 2) {
        asm volatile("ld.global.cs.v2.f32 {%0, %1}, [%2];" : "=f"(v.value[0]), "=f"(v.value[1]) : "l"(at));
    } else {
        asm volatile("ld.global.cs.f32 %0, [%1];" : "=f"(v.value[0]) : "l"(at));
    }
    return v;
}

template <u32 N>
__device__ __forceinline__ void stream_out(Words<N>* at, const Words<N>& v) {
    if constexpr (N == 4) {
        asm volatile("st.global.cs.v4.f32 [%0], {%1, %2, %3, %4};"
                     :
                     : "l"(at), "f"(v.value[0]), "f"(v.value[1]), "f"(v.value[2]), "f"(v.value[3])
                     : "memory");
    } else if constexpr (N == 2) {
        asm volatile("st.global.cs.v2.f32 [%0], {%1, %2};" : : "l"(at), "f"(v.value[0]), "f"(v.value[1]) : "memory");
    } else {
        asm volatile("st.global.cs.f32 [%0], %1;" : : "l"(at), "f"(v.value[0]) : "memory");
    }
}

__device__ __forceinline__ void fence() {
    asm volatile("fence.acq_rel." SCOPE ";" : : : "memory");
}

// What a query loads after this, it loads after what it loaded before; for whole warps. To the hardware an acquire fence is an
// invalidation of L1, which holds nothing that is read again: it costs nothing, where one that also releases costs 10 to 20 %.
// The lanes of a warp hand each other what they loaded by shuffles and votes, and PTX lets only a barrier carry the order from
// lane to lane: that is what HPS_FORMAL_ORDER adds (2 to 15 % slower). Without it the address of the second look depends on the
// bits that were copied, through a vote of the warp, which neither hardware nor compiler can reorder.
__device__ __forceinline__ void acquire() {
#if __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ >= 1208  // PTX 8.6; before, a query relies on its dependencies alone
    asm volatile("fence.acquire." SCOPE ";" : : : "memory");
#elif HPS_FORMAL_ORDER
    fence();
#endif
#if HPS_FORMAL_ORDER
    __syncwarp();
#endif
}

// Where things stand in a bucket.

__device__ __forceinline__ i64* key_at(uint4* bucket, u32 slot) {
    return reinterpret_cast<i64*>(bucket) + 1 + slot;
}

__device__ __forceinline__ u8* strays_at(uint4* bucket) {
    return reinterpret_cast<u8*>(bucket) + 3;
}

__device__ __forceinline__ u8* refused_at(uint4* bucket) {
    return reinterpret_cast<u8*>(bucket) + 2;
}

__device__ __forceinline__ u32 score_of(u32 scores, u32 slot) {
    return scores >> (4 * slot) & 15;
}

__device__ __forceinline__ u32* scores_at(uint4* bucket) {
    return reinterpret_cast<u32*>(bucket) + 1;
}

// Where, in the part of a bucket that a lane holds (`member`: which of the four), a key stands: the slot, or -1.
__device__ __forceinline__ int slot_in_part(const uint4& part, u32 member, i64 key) {
    int slot = -1;
    if (member != 0 && key_of(part.x, part.y) == key) slot = 2 * member - 1;
    if (key_of(part.z, part.w) == key) slot = 2 * member;
    return slot;
}

// Atomics on what several devices may change where the table is shared.

__device__ __forceinline__ u32 fetch_or(u32* at, u32 bits) {
#if HPS_SHARED
    return atomicOr_system(at, bits);
#else
    return atomicOr(at, bits);
#endif
}

template <typename T>
__device__ __forceinline__ void add_to(T* at, T by) {
#if HPS_SHARED
    atomicAdd_system(at, by);
#else
    atomicAdd(at, by);
#endif
}

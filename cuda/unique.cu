// PURPOSE     Makes a query's missing keys distinct and ascending, and gives each miss the row of its key among them.
// ARRAYS      unique: for each segment, missing_keys (m,) int64, in, and rows (m,) uint32, out, both from `missing` on; m is
//             missing_counts[index] (uint32), in, and 0 afterwards. distinct (u,) int64, out, in device memory and in mapped
//             host memory, both from `missing` on. counts[index] in mapped host memory, out: m, and u or TOO_MANY.
//             mark_heads, rank_sorted: keys (m,) int64 and order (m,) int64 (a permutation that sorts them), in. heads
//             (ceil(m / HPS_THREADS),) uint32: distinct keys that begin in each block's part, out, then in. rows (m,) uint32
//             and distinct (u,) int64, out. count uint32, out: u.
// LAUNCH      unique: one block of HPS_THREADS a segment. A segment of more than SORTED_AT_ONCE misses is left to the host
//             (u = TOO_MANY), which sorts it and launches mark_heads, then rank_sorted, in blocks of HPS_THREADS,
//             ceil(m / HPS_THREADS) of them, one thread a key. m = 0 gives u = 0.
// INVARIANTS  distinct is strictly ascending; distinct[rows[i]] == missing_keys[i]. Equal keys may come in any order.
// RACES       None between blocks.
// TWIN        hps.ground.key_sets.DistinctKeys

#include "embedding_cache.cuh"

#ifndef HPS_THREADS
#define HPS_THREADS 512
#endif
#ifndef HPS_SEGMENTS
#define HPS_SEGMENTS 32
#endif

constexpr u32 THREADS = HPS_THREADS;
constexpr u32 SORTED_AT_ONCE = 4096;
constexpr u32 TOO_MANY = 0xffffffffu;
constexpr i64 LAST_KEY = 0x7fffffffffffffffll;

struct UniqueSegment {
    u32 missing;
    u32 index;
};

struct Unique {
    const i64* missing_keys;
    u32* missing_counts;
    u32* rows;
    i64* distinct;
    i64* distinct_on_host;
    uint2* counts;
    UniqueSegment segments[HPS_SEGMENTS];
};

static_assert(sizeof(Unique) == 48 + 8 * HPS_SEGMENTS, "hps/cache/cuda/kernels.py packs this");

// The sum of `value` over the threads before this one; `total` is the sum over the block.
__device__ __forceinline__ u32 sum_before(u32 value, u32& total) {
    __shared__ u32 sums[THREADS / 32];
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u32 sum = sum_to(value, lane);
    if (lane == 31) sums[warp] = sum;
    __syncthreads();
    u32 before = 0;
    total = 0;
    for (u32 w = 0; w < THREADS / 32; ++w) {
        if (w < warp) before += sums[w];
        total += sums[w];
    }
    __syncthreads();
    return before + sum - value;
}

extern "C" __global__ void __launch_bounds__(THREADS) unique(const __grid_constant__ Unique request) {
    __shared__ i64 keys[SORTED_AT_ONCE];
    __shared__ u16 places[SORTED_AT_ONCE];
    const UniqueSegment segment = request.segments[blockIdx.x];
    const u32 m = request.missing_counts[segment.index];
    __syncthreads();
    if (threadIdx.x == 0) request.missing_counts[segment.index] = 0;
    if (m == 0 || m > SORTED_AT_ONCE) {
        if (threadIdx.x == 0) request.counts[segment.index] = make_uint2(m, m == 0 ? 0 : TOO_MANY);
        return;
    }

    u32 size = 32;  // the power of two that is sorted; what is not a key comes last, by its place
    while (size < m) size *= 2;
    for (u32 i = threadIdx.x; i < size; i += THREADS) {
        keys[i] = i < m ? request.missing_keys[segment.missing + i] : LAST_KEY;
        places[i] = i;
    }
    for (u32 run = 2; run <= size; run *= 2) {  // bitonic sort
        for (u32 step = run / 2; step > 0; step /= 2) {
            __syncthreads();
            for (u32 i = threadIdx.x; i < size / 2; i += THREADS) {
                const u32 low = 2 * i - (i & (step - 1)), high = low + step;
                const i64 a = keys[low], b = keys[high];
                const u16 at_a = places[low], at_b = places[high];
                if ((a > b || (a == b && at_a > at_b)) == ((low & run) == 0)) {
                    keys[low] = b;
                    keys[high] = a;
                    places[low] = at_b;
                    places[high] = at_a;
                }
            }
        }
    }
    __syncthreads();

    const u32 share = (m + THREADS - 1) / THREADS, start = threadIdx.x * share, stop = min(start + share, m);
    u32 heads = 0, u = 0;
    for (u32 i = start; i < stop; ++i) heads += i == 0 || keys[i] != keys[i - 1];
    u32 row = sum_before(heads, u);
    for (u32 i = start; i < stop; ++i) {
        if (i == 0 || keys[i] != keys[i - 1]) {
            request.distinct[segment.missing + row] = keys[i];
            request.distinct_on_host[segment.missing + row] = keys[i];
            ++row;
        }
        request.rows[segment.missing + places[i]] = row - 1;
    }
    if (threadIdx.x == 0) request.counts[segment.index] = make_uint2(m, u);
}

struct RankSorted {
    const i64* keys;
    const i64* order;
    u32* heads;
    u32* rows;
    i64* distinct;
    u32* count;
    u32 m;
    u32 padding;
};

static_assert(sizeof(RankSorted) == 56, "hps/cache/cuda/kernels.py packs this");

__device__ __forceinline__ bool begins(const RankSorted& request, u32 i, i64 key) {
    return i == 0 || request.keys[request.order[i - 1]] != key;
}

extern "C" __global__ void __launch_bounds__(THREADS) mark_heads(const __grid_constant__ RankSorted request) {
    const u32 i = blockIdx.x * THREADS + threadIdx.x;
    const bool head = i < request.m && begins(request, i, request.keys[request.order[i]]);
    const u32 heads = __syncthreads_count(head);
    if (threadIdx.x == 0) request.heads[blockIdx.x] = heads;
}

extern "C" __global__ void __launch_bounds__(THREADS) rank_sorted(const __grid_constant__ RankSorted request) {
    u32 earlier = 0, base = 0, total = 0;
    for (u32 block = threadIdx.x; block < blockIdx.x; block += THREADS) earlier += request.heads[block];
    sum_before(earlier, base);
    const u32 i = blockIdx.x * THREADS + threadIdx.x;
    const bool asked = i < request.m;
    const u32 place = asked ? static_cast<u32>(request.order[i]) : 0;
    const i64 key = asked ? request.keys[place] : 0;
    const bool head = asked && begins(request, i, key);
    const u32 row = base + sum_before(head, total) + head - 1;
    if (head) request.distinct[row] = key;
    if (asked) request.rows[place] = row;
    if (i + 1 == request.m) *request.count = row + 1;
}

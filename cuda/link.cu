// PURPOSE     Answers the misses of a large lookup from attached tables of the host's memory: makes them distinct, puts them
//             into the order of their rows, reads them, and hands them to all that ask.
// ARRAYS      For each segment, from its `missing` on: missing_keys int64 and missing_positions uint32, in, as many as
//             missing_counts[index] (uint32, in, 0 afterwards). leaders uint32: of each miss the first one of its key. ranks
//             uint32: of a leader within its bin. order uint32: the leaders, by bin. states uint8: of a leader, FOUND, ABSENT
//             or LEFT. staged_keys int64, staged_epochs uint64, staged_found uint8 and staged (staged_rows, dim) float32, out:
//             keys to admit where staged_found is 1, in the order of `order`. out (n, dim) float32 and found (n,) uint8 or
//             null, out. left_keys int64 and left_positions uint32, out: what the host must answer, as many as left_counts[
//             index] (uint32, must be 0 before). slots (slot_mask + 1,) uint32 and bins (segment_count << bin_bits,) uint32:
//             must be 0 before mark. leader_counts (segments,) uint32. tallies (segments, 2) uint32: keys linked and absent,
//             must be 0 before, 0 afterwards. finished uint32, likewise. any_left uint32 and reports (segments, 2) uint32 in
//             mapped host memory, out: any_left becomes 1 if a key is left; reports are the tallies. versions and
//             versions_after (segment_count, 1 << STRIPE_BITS) uint64: of the tables' stripes, before and after fetch.
// LAUNCH      mark, place, fetch, check, mend, spread, in this order, each with any number of blocks: a warp takes one part of
//             the misses after another, in their order: 32 in mark, place and spread, 8 in fetch and mend. place and check have
//             blocks of 1,024 threads, the others of HPS_THREADS. Few blocks in fetch keep what is read at once together in the
//             host's memory, enough of them hide its latency (docs/gpu-cache.md).
// INVARIANTS  order holds each distinct key of an attached segment once; those of one bin (the upper bin_bits bits of the
//             hash) are together, bins ascend. With `settles`, nothing is left: what nobody could read gets the default vector,
//             and all is counted in the links. A segment that is not attached leaves all its misses.
// RACES       fetch reads without a look at the versions of the stripes, which would cost as much as the rows: warps that read
//             one line of the host's memory wait for each other. check reads them all once; what fetch read of stripes that have
//             changed since place, or had a version that was odd then, mend reads again, with a look at each. Nobody sees the
//             outputs before. mark claims a slot with a compare-and-swap; whoever comes first is the leader. The host may change
//             the tables meanwhile (host_table.cuh).
// TWIN        hps.databases.hash_map.kernels.fetch

#include "embedding_cache.cuh"
#include "host_table.cuh"

#ifndef HPS_THREADS
#define HPS_THREADS 128
#endif
#ifndef HPS_MIN_BLOCKS
#define HPS_MIN_BLOCKS 1
#endif
#ifndef HPS_SEGMENTS
#define HPS_SEGMENTS 32
#endif

struct LinkSegment {
    const HostLayout* const* layout;  // where the address of its layout stands; null: the table is not attached
    Link* link;
    Unit* out;
    u8* found;
    Unit* staged;
    u32 missing;
    u32 index;  // of its counts
    u32 units;  // of a row: dim / HPS_UNIT
    u32 staged_rows;
    float default_value;
    u32 authoritative;
};

struct Linked {
    LinkSegment segments[HPS_SEGMENTS];
    const i64* missing_keys;
    const u32* missing_positions;
    u32* missing_counts;
    u32* leaders;
    u32* ranks;
    u32* order;
    u8* states;
    i64* left_keys;
    u32* left_positions;
    u32* left_counts;
    i64* staged_keys;
    u64* staged_epochs;
    u8* staged_found;
    u32* slots;
    u32* bins;
    u32* leader_counts;
    uint2* tallies;
    u32* finished;
    u32* any_left;
    uint2* reports;
    u64* versions;
    u64* versions_after;
    u32 slot_mask;
    u32 bin_bits;
    u32 segment_count;
    u32 patience;
    u32 settles;
    u32 zero;  // always 0, which the compiler does not know
};

static_assert(sizeof(LinkSegment) == 64 && sizeof(Linked) == 64 * HPS_SEGMENTS + 200, "hps/cache/cuda/kernels.py packs these");

// The parts of up to 32 lists, numbered through; a warp asks for one after the other. Lane s knows list s.
struct Parts {
    u32 size, count, first_part, total;

    __device__ __forceinline__ Parts(const Linked& request, const u32* counts, u32 size) : size(size) {
        const u32 lane = threadIdx.x % 32;
        count = lane < request.segment_count ? counts[request.segments[lane].index] : 0;
        const u32 parts = (count + size - 1) / size;
        const u32 sum = sum_to(parts, lane);
        first_part = sum - parts;
        total = __shfl_sync(FULL_WARP, sum, 31);
    }

    // The list that a part belongs to, its first entry and how many it has; for whole warps, part < total.
    __device__ __forceinline__ void find(u32 part, u32& segment, u32& first, u32& entries) const {
        const u32 begun = __ballot_sync(FULL_WARP, first_part <= part && count > 0);
        segment = 31 - __clz(begun);
        first = (part - __shfl_sync(FULL_WARP, first_part, segment)) * size;
        entries = min(size, __shfl_sync(FULL_WARP, count, segment) - first);
    }
};

__device__ __forceinline__ u32 warp_of_grid() {
    return (blockIdx.x * blockDim.x + threadIdx.x) / 32;
}

__device__ __forceinline__ u32 warps_of_grid() {
    return gridDim.x * blockDim.x / 32;
}

extern "C" __global__ void __launch_bounds__(HPS_THREADS) mark(const __grid_constant__ Linked request) {
    const Parts parts(request, request.missing_counts, 32);
    const u32 lane = threadIdx.x % 32;
    for (u32 part = warp_of_grid(); part < parts.total; part += warps_of_grid()) {
        u32 s, first, entries;
        parts.find(part, s, first, entries);
        const LinkSegment& segment = request.segments[s];
        if (segment.layout == nullptr || lane >= entries) continue;
        const u32 begin = segment.missing, end = begin + request.missing_counts[segment.index], i = begin + first + lane;
        const i64 key = request.missing_keys[i];
        const u64 hashed = mix(key);
        u32 leader = i, slot = (static_cast<u32>(hashed >> 8) + s * 0x9E3779B9u) & request.slot_mask;
        for (;; slot = (slot + 1) & request.slot_mask) {
            u32 held = *reinterpret_cast<volatile u32*>(request.slots + slot);
            if (held == 0) held = atomicCAS(request.slots + slot, 0u, i + 1);
            if (held == 0) break;  // it is ours
            if (held > begin && held <= end && request.missing_keys[held - 1] == key) {
                leader = held - 1;
                break;
            }
        }
        request.leaders[i] = leader;
        if (leader == i) {
            const u32 bin = s << request.bin_bits | static_cast<u32>(hashed >> (64 - request.bin_bits));
            request.ranks[i] = atomicAdd(request.bins + bin, 1);
        }
    }
}

constexpr u32 PLACE_THREADS = 1024;  // and the most bins
static_assert(PLACE_THREADS == 1 << STRIPE_BITS, "one thread a stripe");

// Note the versions of all stripes of the attached tables.
__device__ __forceinline__ void read_versions(const Linked& request, u64* versions) {
    for (u32 s = blockIdx.x; s < request.segment_count; s += gridDim.x) {
        if (request.segments[s].layout == nullptr) continue;
        const HostLayout* const layout = reinterpret_cast<const HostLayout*>(load_word(request.segments[s].layout));
        const u64 version = layout == nullptr ? 1 : load_host_word(layout->versions + VERSION_BYTES * threadIdx.x);
        versions[s << STRIPE_BITS | threadIdx.x] = version;
    }
}

extern "C" __global__ void __launch_bounds__(PLACE_THREADS) place(const __grid_constant__ Linked request) {
    __shared__ u32 starts[PLACE_THREADS + 1], sums[PLACE_THREADS / 32];
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u32 bins = request.segment_count << request.bin_bits;
    u32 sum = sum_to(threadIdx.x < bins ? request.bins[threadIdx.x] : 0, lane);
    if (lane == 31) sums[warp] = sum;
    __syncthreads();
    for (u32 w = 0; w < warp; ++w) sum += sums[w];
    starts[threadIdx.x + 1] = sum;
    if (threadIdx.x == 0) starts[0] = 0;
    __syncthreads();
    if (blockIdx.x == 0 && threadIdx.x < request.segment_count) {
        const u32 first = threadIdx.x << request.bin_bits;
        request.leader_counts[request.segments[threadIdx.x].index] = starts[first + (1u << request.bin_bits)] - starts[first];
    }
    read_versions(request, request.versions);
    const Parts parts(request, request.missing_counts, 32);
    for (u32 part = warp_of_grid(); part < parts.total; part += warps_of_grid()) {
        u32 s, first, entries;
        parts.find(part, s, first, entries);
        const LinkSegment& segment = request.segments[s];
        if (segment.layout == nullptr || lane >= entries) continue;
        const u32 i = segment.missing + first + lane;
        if (request.leaders[i] != i) continue;
        const u32 in_bin = static_cast<u32>(mix(request.missing_keys[i]) >> (64 - request.bin_bits));
        const u32 own = s << request.bin_bits;
        request.order[segment.missing + starts[own + in_bin] - starts[own] + request.ranks[i]] = i;
    }
}

__device__ __forceinline__ u32 stripe_of(u32 segment, i64 key) {
    return segment << STRIPE_BITS | static_cast<u32>(mix(key) >> (64 - STRIPE_BITS));
}

// Read the leaders' rows. First all, without a look at versions; then, with LOOKS, those that were not read, or whose stripe has
// changed.
template <bool LOOKS>
__device__ __forceinline__ void read_leaders(const Linked& request) {
    __shared__ u32 positions[HPS_THREADS / 32][READ_AT_ONCE];
    const Parts parts(request, request.leader_counts, READ_AT_ONCE);
    const u32 lane = threadIdx.x % 32, tile = lane / 4;
    u32* const to = positions[threadIdx.x / 32];
#pragma unroll 1
    for (u32 part = warp_of_grid(); part < parts.total; part += warps_of_grid()) {
        u32 s, first, entries;
        parts.find(part, s, first, entries);
        const LinkSegment& segment = request.segments[s];
        const u32 units = segment.units;
        bool asks = tile < entries;
        const u32 leader = asks ? request.order[segment.missing + first + tile] : 0;
        const i64 key = asks ? request.missing_keys[leader] : 0;
        u64 version = 1;
        if (LOOKS) {
            if (asks) version = request.versions_after[stripe_of(s, key)];
            asks = asks && (request.states[leader] == LEFT || version != request.versions[stripe_of(s, key)]);
            if (!__any_sync(FULL_WARP, asks)) continue;
        }
        __syncwarp();
        if (asks && lane % 4 == 0) to[tile] = request.missing_positions[leader];
        __syncwarp();
        const u64 epoch = load_acquire(&segment.link->epoch);
        const auto store = [&](u32 of, u32 unit, const Unit& value) {
            stream_out(segment.out + static_cast<u64>(to[of]) * units + unit, value);
            if (first + of < segment.staged_rows) segment.staged[static_cast<u64>(first + of) * units + unit] = value;
        };
        u32 state = read_host<LOOKS>(segment.layout, key, asks, version, units, request.patience, request.zero, store);
        if (!LOOKS && asks && request.versions[stripe_of(s, key)] & 1) state = LEFT;
        if (asks && lane % 4 == 0) {
            request.states[leader] = state;
            const u32 at = segment.missing + first + tile;
            if (first + tile < segment.staged_rows) {
                request.staged_keys[at] = key;
                request.staged_epochs[at] = epoch;
                request.staged_found[at] = state == FOUND;
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(HPS_THREADS, HPS_MIN_BLOCKS) fetch(const __grid_constant__ Linked request) {
    read_leaders<false>(request);
}

extern "C" __global__ void __launch_bounds__(PLACE_THREADS) check(const __grid_constant__ Linked request) {
    read_versions(request, request.versions_after);
}

extern "C" __global__ void __launch_bounds__(HPS_THREADS, HPS_MIN_BLOCKS) mend(const __grid_constant__ Linked request) {
    read_leaders<true>(request);
}

extern "C" __global__ void __launch_bounds__(HPS_THREADS) spread(const __grid_constant__ Linked request) {
    const Parts parts(request, request.missing_counts, 32);
    const u32 lane = threadIdx.x % 32, earlier = (1u << lane) - 1;
    for (u32 part = warp_of_grid(); part < parts.total; part += warps_of_grid()) {
        u32 s, first, entries;
        parts.find(part, s, first, entries);
        const LinkSegment& segment = request.segments[s];
        const bool asks = lane < entries, attached = segment.layout != nullptr;
        const u32 i = segment.missing + first + lane, units = segment.units;
        u32 leader = i, state = LEFT, position = 0, source = 0;
        if (asks) {
            position = request.missing_positions[i];
            if (attached) {
                leader = request.leaders[i];
                state = request.states[leader];
                source = request.missing_positions[leader];
            }
        }
        const bool is_found = asks && state == FOUND;
        const bool is_absent = asks && state == ABSENT && segment.authoritative;
        const bool is_left = asks && !is_found && !is_absent;
        const u32 found = __ballot_sync(FULL_WARP, is_found), absent = __ballot_sync(FULL_WARP, is_absent),
                  left = __ballot_sync(FULL_WARP, is_left);
        for (u32 to = __ballot_sync(FULL_WARP, is_found && leader != i); to; to &= to - 1) {
            const u32 from = __shfl_sync(FULL_WARP, source, __ffs(to) - 1), row = __shfl_sync(FULL_WARP, position, __ffs(to) - 1);
            for (u32 unit = lane; unit < units; unit += 32) {
                segment.out[static_cast<u64>(row) * units + unit] = segment.out[static_cast<u64>(from) * units + unit];
            }
        }
        for (u32 to = request.settles ? absent | left : absent; to; to &= to - 1) {
            const u32 row = __shfl_sync(FULL_WARP, position, __ffs(to) - 1);
            Unit value;
#pragma unroll
            for (u32 u = 0; u < UNIT; ++u) value.value[u] = segment.default_value;
            for (u32 unit = lane; unit < units; unit += 32) {
                stream_out(segment.out + static_cast<u64>(row) * units + unit, value);
            }
        }
        if (asks && segment.found != nullptr) segment.found[position] = is_found;
        if (left && !request.settles) {
            u32 place = 0;
            if (lane == 0) {
                place = atomicAdd(request.left_counts + segment.index, __popc(left));
                *request.any_left = 1;
            }
            place = segment.missing + __shfl_sync(FULL_WARP, place, 0) + __popc(left & earlier);
            if (is_left) {
                request.left_keys[place] = request.missing_keys[i];
                request.left_positions[place] = position;
            }
        }
        if (lane == 0 && request.settles) {
            atomicAdd(segment.link->counters, static_cast<u64>(entries));
            if (found) atomicAdd(segment.link->counters + 1, static_cast<u64>(__popc(found)));
            if (absent) atomicAdd(segment.link->counters + 2, static_cast<u64>(__popc(absent)));
            if (left) atomicAdd(segment.link->counters + 3, static_cast<u64>(__popc(left)));
        } else if (lane == 0) {
            if (found) atomicAdd(&request.tallies[segment.index].x, __popc(found));
            if (absent) atomicAdd(&request.tallies[segment.index].y, __popc(absent));
        }
    }
    __syncthreads();
    __shared__ bool last;
    if (threadIdx.x == 0) {
        __threadfence();
        last = atomicAdd(request.finished, 1) == gridDim.x - 1;
        __threadfence();
    }
    __syncthreads();
    if (!last || threadIdx.x >= request.segment_count) return;
    const u32 index = request.segments[threadIdx.x].index;
    volatile uint2* const tally = request.tallies + index;
    request.reports[index] = make_uint2(tally->x, tally->y);
    tally->x = tally->y = 0;
    request.missing_counts[index] = 0;
    if (threadIdx.x == 0) *request.finished = 0;
}

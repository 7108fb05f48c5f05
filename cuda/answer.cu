// PURPOSE     Answers the misses of a query from attached tables of the host's memory, and admits their vectors to the cache: in
//             one launch, which ends at once where nothing is missing, and takes no longer for more keys that are resident.
//             admit_answers admits those that a launch of answer with `defers` has left to it, in a launch that nobody waits for.
// ARRAYS      For each segment, from its `missing` on: missing_keys int64 and missing_positions uint32, in, as many as
//             missing_counts[index] (uint32, in, 0 afterwards). leaders uint32: of each miss the first one of its key. ranks
//             uint32: of a leader within its bin. order uint32: the leaders, by bin. states uint8: of a leader, FOUND, ABSENT
//             or LEFT. out (n, dim) float32 and found (n,) uint8 or null, out. staged (staged_rows, width) words or null, out: the
//             same rows for the admission, where reading `out` again is slow. left_keys int64 and left_positions uint32, out:
//             what the host must answer, as many as left_counts[index] (uint32, must be 0 before). buckets, rows and counters
//             of its table of the cache, in/out. slots (1 << slot_bits,) uint32, at least twice the misses, and bins
//             (segment_count << bin_bits,) uint32: must be 0 before, 0 afterwards. leader_counts (segments,) uint32: 0 where
//             nothing was put into order. tallies (segments, 2) uint32: keys linked and absent, must be 0 before, 0 afterwards;
//             progress likewise. epochs (segment_count,) uint64. versions and versions_after (segment_count, 1 << STRIPE_BITS)
//             uint64: of the tables' stripes, before and after fetch. any_left uint32 and reports (segments, 2) uint32 in mapped
//             host memory, out: any_left becomes 1 if a key is left; reports are the tallies, written if anything was missing.
//             done uint64 in mapped host memory or null, out: becomes `number` once all is answered and reported. Few misses may be
//             admitted after that, from the staged rows, which the next launch on the stream may use again.
// LAUNCH      Any number of blocks of HPS_THREADS; one an SM keeps all of a few thousand misses in flight. May be launched before
//             the query has ended (programmatic dependent launch).
// INVARIANTS  Up to `few` misses are read as they came. More are made distinct and put into the order of their rows first: order
//             holds each distinct key of an attached segment once; those of one bin (see bin_of) are together, bins ascend;
//             `fetch_warps` warps of a block read them, since few warps keep what is read at once together in the host's memory,
//             and enough of them hide its latency (docs/gpu-cache.md). With `settles`, nothing is left: what nobody could read
//             gets the default vector, any_left becomes 1 if there was any, and all is counted in the links. A segment that is not
//             attached leaves all its misses.
// RACES       Phases of many misses follow each other within the launch, without a demand on how many blocks run at once: blocks
//             draw tickets, a phase after the other, and a block waits only for tickets drawn before its own, whose blocks run.
//             fetch reads without a look at the versions of the stripes, which would cost as much as the rows: warps that read
//             one line of the host's memory wait for each other. check reads them all once; what fetch read of stripes that have
//             changed since mark, or had a version that was odd then, mend reads again, with a look at each. Nobody sees the
//             outputs before. mark claims a slot with a compare-and-swap; whoever comes first is the leader. The host may change
//             the tables meanwhile (host_table.cuh). An epoch is read before the rows that are admitted by it (admission.cuh).
// TWIN        hps.stores.hash_map.kernels.fetch

#include "embedding_cache.cuh"
#include "rows.cuh"
#include "host_table.cuh"
#include "row_file.cuh"
#include "sharing.cuh"
#include "writer.cuh"
#include "admission.cuh"

#ifndef HPS_THREADS
#define HPS_THREADS 256
#endif
#ifndef HPS_MIN_BLOCKS
#define HPS_MIN_BLOCKS 1  // of an SM: bounds the registers
#endif
#ifndef HPS_SEGMENTS
#define HPS_SEGMENTS 32
#endif

#ifndef HPS_FEW_A_WARP
#define HPS_FEW_A_WARP 4
#endif

constexpr u32 WARPS = HPS_THREADS / 32;
constexpr u32 FEW_A_WARP = HPS_FEW_A_WARP;  // misses, at most READ_AT_ONCE: of few, so that all are read, and admitted, at once
constexpr u32 MOST_BIN_BITS = 10;
constexpr u32 MOST_BINS = 1 << MOST_BIN_BITS;

// Rows are read by parts, and admitted from the staged ones alone.
constexpr bool BY_PARTS = PACKED || HPS_OUT != 0 || HPS_ROW_FILES;

struct AnswerSegment {
    Table table;                      // of the cache
    const HostLayout* const* layout;  // where the address of its layout stands; null: the table is not attached
    Link* link;
    OutUnit* out;
    u8* found;
    uint4* staged;
    u32 missing;
    u32 index;  // of its counts
    u32 units;  // of a vector: dim / HPS_UNIT; above FORMAT_SHIFT the format of the rows
    u32 staged_rows;
    float default_value;
    u32 authoritative;
    float bins_per_row;  // of MOST_BINS, for dense keys; 0: there are none
    u32 padding;
};

struct Progress {
    u32 tickets;   // drawn
    u32 done;      // of these, ended
    u32 finished;  // blocks that have nothing left to do
    u32 mends;     // 1: a row is to be read again
};

struct Answer {
    AnswerSegment segments[HPS_SEGMENTS];
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
    u32* slots;
    u32* bins;
    u32* leader_counts;
    uint2* tallies;
    Progress* progress;
    u64* epochs;
    u64* versions;
    u64* versions_after;
    u32* any_left;
    uint2* reports;
    u64* done;
    u64 number;
    u32 bin_bits;
    u32 segment_count;
    u32 patience;
    u32 few;
    u32 fetch_warps;  // of a block; of row files, in the upper half, those for at least MANY misses, or 0
    u8 settles;
    u8 defers;     // the admission of many: `admit_answers` follows
    u8 slot_bits;  // there are 1 << slot_bits slots
    u8 zero;       // always 0, which the compiler does not know
};

static_assert(sizeof(AnswerSegment) == 120 && sizeof(Answer) == 120 * HPS_SEGMENTS + 200, "hps/cache/cuda/kernels.py packs these");

// The parts of up to 32 lists, numbered through. Lane s knows list s.
struct Parts {
    u32 size, count, first_part, total;

    __device__ __forceinline__ Parts(const Answer& request, const u32* counts, u32 size) : size(size) {
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

__device__ __forceinline__ u32 load_acquire(const u32* at) {
    u32 v;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
    return v;
}

__device__ __forceinline__ bool caches(const AnswerSegment& segment) {
    return segment.layout != nullptr && segment.table.pairs != 0;
}

// Finish misses that were read, one a lane: give default vectors to those that no tier has, or nobody may wait for, list those
// that are left, and count; for whole warps. `i` is the miss, `position` that of its row.
__device__ __forceinline__ void conclude(const Answer& request, const AnswerSegment& segment, bool asks, u32 state, u32 i,
                                         u32 position) {
    const u32 lane = threadIdx.x % 32, units = units_of(segment.units);
    const bool is_found = asks && state == FOUND;
    const bool is_absent = asks && state == ABSENT && segment.authoritative;
    const bool is_left = asks && !is_found && !is_absent;
    const u32 found = __ballot_sync(FULL_WARP, is_found), absent = __ballot_sync(FULL_WARP, is_absent),
              left = __ballot_sync(FULL_WARP, is_left);
    for (u32 to = request.settles ? absent | left : absent; to; to &= to - 1) {
        const u32 row = __shfl_sync(FULL_WARP, position, __ffs(to) - 1);
        Unit value;
#pragma unroll
        for (u32 u = 0; u < UNIT; ++u) value.value[u] = segment.default_value;
        for (u32 unit = lane; unit < units; unit += 32) stream_out(segment.out + static_cast<u64>(row) * units + unit, narrowed(value));
    }
    if (asks && segment.found != nullptr) segment.found[position] = is_found;
    if (left && !request.settles) {
        u32 place = 0;
        if (lane == 0) place = atomicAdd(request.left_counts + segment.index, __popc(left));
        place = segment.missing + __shfl_sync(FULL_WARP, place, 0) + __popc(left & ((1u << lane) - 1));
        if (is_left) {
            request.left_keys[place] = request.missing_keys[i];
            request.left_positions[place] = position;
        }
    }
    if (lane != 0) return;
    if (request.settles) {
        atomicAdd(segment.link->counters, static_cast<u64>(__popc(found | absent | left)));
        if (found) atomicAdd(segment.link->counters + 1, static_cast<u64>(__popc(found)));
        if (absent) atomicAdd(segment.link->counters + 2, static_cast<u64>(__popc(absent)));
        if (left) {
            atomicAdd(segment.link->counters + 3, static_cast<u64>(__popc(left)));
            *request.any_left = 1;
        }
    } else {
        if (found) atomicAdd(&request.tallies[segment.index].x, __popc(found));
        if (absent) atomicAdd(&request.tallies[segment.index].y, __popc(absent));
    }
}

// Parts of 16 bytes that a staged row takes where rows are read by parts.
__device__ __forceinline__ u32 staged_parts(u32 width) {
    return (width + 3) / 4;
}

// Write the elements of a part of a row to its vector.
template <u32 FORMAT>
__device__ __forceinline__ void write_part(OutUnit* row, u32 dim, u32 part, const uint4& words, u32 last) {
    if constexpr (!OCCURS<FORMAT>) return;
    constexpr u32 IN_WORD = FORMAT == INT8 ? 4 : FORMAT == FLOAT32 ? 1 : 2;
    const u32 word[4] = {words.x, words.y, words.z, words.w};
    const Scale by(last);
#pragma unroll
    for (u32 first = 0; first < 4 * IN_WORD; first += UNIT) {
        const u32 element = 4 * IN_WORD * part + first;
        Unit value;
#pragma unroll
        for (u32 i = 0; i < UNIT; ++i) {
            const u32 own = word[(first + i) / IN_WORD], within = (first + i) % IN_WORD;
            if constexpr (FORMAT == INT8) {
                value.value[i] = by.widen(own, within);
            } else if constexpr (FORMAT == FLOAT32) {
                value.value[i] = __uint_as_float(own);
            } else {
                value.value[i] = widen_half<FORMAT>(own >> (16 * within) & 0xffff);
            }
        }
        if (element < dim) stream_out(row + element / UNIT, narrowed(value));
    }
}

// Write a part of a row to its output and, as far as it is to be admitted from there, to the staged rows. `to` are the positions of
// the tiles' outputs, `first` the staged row of the first.
__device__ __forceinline__ void store_part(const AnswerSegment& segment, const u32* to, u32 first, u32 of, u32 part, const uint4& words,
                                           u32 last) {
    const u32 units = units_of(segment.units), dim = units * UNIT, format = format_of(segment.units);
    OutUnit* const row = segment.out + static_cast<u64>(to[of]) * units;
    if (first + of < segment.staged_rows) {
        segment.staged[static_cast<u64>(first + of) * staged_parts(width_of(format, dim)) + part] = words;
    }
    switch (format) {
        case FLOAT32: write_part<FLOAT32>(row, dim, part, words, last); break;
        case FLOAT16: write_part<FLOAT16>(row, dim, part, words, last); break;
        case BFLOAT16: write_part<BFLOAT16>(row, dim, part, words, last); break;
        case INT8: write_part<INT8>(row, dim, part, words, last); break;
    }
}

// Read the rows of up to 8 keys, one a tile of 4 lanes, to their outputs and the staged rows; see read_host and store_part.
template <bool LOOKS, typename Meanwhile>
__device__ __forceinline__ u32 read_rows(const Answer& request, const AnswerSegment& segment, const HostLayout* early, i64 key,
                                         bool asks, u64 version, const u32* to, u32 first, Meanwhile meanwhile) {
    const u32 units = units_of(segment.units), width = width_of(format_of(segment.units), units * UNIT);
    const auto store = [&](u32 of, u32 part, const uint4& words, u32 last) { store_part(segment, to, first, of, part, words, last); };
#if HPS_ROW_FILES
    const auto copy = [&](u64 source, u32& matched) { return copy_records(source, key, width, matched, store); };
    return read_row_file<LOOKS>(segment.layout, key, asks, version, width, request.patience, request.zero, copy);
#else
    const auto copy = [&](u64 source) {
        if constexpr (BY_PARTS) return copy_parts(source, width, store);
        return copy_units(source, units, [&](u32 of, u32 unit, const Unit& value) {
            stream_out(segment.out + static_cast<u64>(to[of]) * units + unit, narrowed(value));
            if (first + of < segment.staged_rows) {
                reinterpret_cast<Unit*>(segment.staged)[static_cast<u64>(first + of) * units + unit] = value;
            }
        });
    };
    return read_host<LOOKS>(segment.layout, early, key, asks, version, request.patience, request.zero, copy, meanwhile);
#endif
}

// Admit up to 4 keys that were found, one a tile of 8 lanes; for whole warps. `row` is the key's among `out`, `staged_row` among
// the staged ones.
__device__ __forceinline__ void admit_keys(const AnswerSegment& segment, Admissions& counts, bool chosen, i64 key, u32 row,
                                           u32 staged_row, u64 epoch, bool checked = false) {
    if (!__any_sync(FULL_WARP, chosen)) return;
    const bool is_staged = BY_PARTS || segment.staged != nullptr;
    const u32 width = width_of(format_of(segment.units), units_of(segment.units) * UNIT);
    const u32 pieces = width / HPS_PIECE;
    const Piece* vector;
    if constexpr (BY_PARTS) {
        vector = reinterpret_cast<const Piece*>(segment.staged + static_cast<u64>(staged_row) * staged_parts(width));
    } else {
        vector = is_staged ? reinterpret_cast<const Piece*>(segment.staged) + static_cast<u64>(staged_row) * pieces
                           : reinterpret_cast<const Piece*>(segment.out) + static_cast<u64>(row) * pieces;
    }
    if (threadIdx.x % 32 == 0) counts = {0, 0};
    __syncwarp();
    const bool pending = chosen && (epoch & 1) == 0 && (!is_staged || staged_row < segment.staged_rows);
    write_keys(segment.table, ADMIT, key, pending, vector, pieces, &segment.link->epoch, epoch, counts, checked);
    __syncwarp();
    if (threadIdx.x % 32 == 0) counts.add_to(segment.table.counters);
    __syncwarp();
}

// What a warp has read of few misses, and not yet admitted. Lane l knows entry l.
struct Read {
    u32 s, first, entries;  // a part of `Parts`; no entries: nothing
    u32 position, state;
    i64 key;
    u64 epoch;
    bool may;  // of the tile of 8 lanes: it is worth to own the pair of its key
};

__device__ __forceinline__ void admit_read(const Answer& request, const Read& read, Admissions& counts) {
    const u32 lane = threadIdx.x % 32;
#pragma unroll 1
    for (u32 entry = lane / TILE; entry - lane / TILE < read.entries; entry += TILES) {
        const i64 one = __shfl_sync(FULL_WARP, read.key, entry);
        const u32 row = __shfl_sync(FULL_WARP, read.position, entry), became = __shfl_sync(FULL_WARP, read.state, entry);
        const bool chosen = entry < read.entries && became == FOUND && read.may;
        admit_keys(request.segments[read.s], counts, chosen, one, row, read.first + entry, read.epoch, !HPS_ROW_FILES);
    }
}

// What lane s reads of segment s while the query still runs, and few misses need first.
struct Early {
    const HostLayout* layout;
    u64 epoch;

    __device__ __forceinline__ explicit Early(const Answer& request) : layout(nullptr), epoch(1) {
        const u32 lane = threadIdx.x % 32;
        if (HPS_ROW_FILES || lane >= request.segment_count || request.segments[lane].layout == nullptr) return;
        epoch = load_acquire(&request.segments[lane].link->epoch);
        layout = reinterpret_cast<const HostLayout*>(load_word(request.segments[lane].layout));
        if (layout == nullptr) return;
        for (u32 byte = 0; byte < sizeof(HostLayout) + 8; byte += 128) {  // to the caches: its fields, and the first slabs
            [[maybe_unused]] u32 word;
            asm volatile("ld.global.u32 %0, [%1];" : "=r"(word) : "l"(reinterpret_cast<const u8*>(layout) + byte) : "memory");
        }
    }
};

// Answer few misses, in the order in which they came, and admit all but those that a warp has read last, which it returns.
__device__ __forceinline__ Read answer_few(const Answer& request, const Early& early, const Parts& parts, u32* to,
                                           Admissions& counts) {
    const u32 lane = threadIdx.x % 32, tile = lane / 4;
    Read last{};
#pragma unroll 1
    for (u32 part = blockIdx.x + threadIdx.x / 32 * gridDim.x; part < parts.total; part += gridDim.x * WARPS) {
        admit_read(request, last, counts);
        last.entries = 0;
        u32 s, first, entries;
        parts.find(part, s, first, entries);
        const AnswerSegment& segment = request.segments[s];
        const u32 i = segment.missing + first + lane;
        const bool mine = lane < entries;
        const i64 key = mine ? request.missing_keys[i] : 0;
        const u32 position = mine ? request.missing_positions[i] : 0;
        u32 state = LEFT;
        if (segment.layout != nullptr) {
            __syncwarp();
            if (lane < READ_AT_ONCE) to[lane] = position;
            __syncwarp();
#if HPS_ROW_FILES
            const u64 epoch = load_acquire(&segment.link->epoch);
#else
            const u64 epoch = __shfl_sync(FULL_WARP, early.epoch, s);
#endif
            const HostLayout* const layout =
                reinterpret_cast<const HostLayout*>(__shfl_sync(FULL_WARP, reinterpret_cast<u64>(early.layout), s));
            static_assert(FEW_A_WARP <= TILES, "one key a tile");
            bool may = true;
            const auto check = [&](bool found) {
                if (!caches(segment)) return;
                const u32 entry = lane / TILE;
                const bool reads = __shfl_sync(FULL_WARP, found, 4 * entry) && entry < entries && (epoch & 1) == 0;
                const bool writes = may_write(segment.table, ADMIT, __shfl_sync(FULL_WARP, key, entry), reads);
                if (reads) may = writes;
            };
            const u32 read =
                read_rows<true>(request, segment, layout, __shfl_sync(FULL_WARP, key, tile), tile < entries, 1, to, first, check);
            state = __shfl_sync(FULL_WARP, read, 4 * lane % 32);
            __syncwarp();
            last = {s, first, caches(segment) ? entries : 0, position, state, key, epoch, may};
        }
        conclude(request, segment, mine, state, i, position);
    }
    return last;
}

// The bin of a key, of 1 << bin_bits that ascend with its row: rows lie in the order of their keys' hashes, dense ones in that of
// the keys. What is no dense key and taken for one is only read out of order.
__device__ __forceinline__ u32 bin_of(const Answer& request, const AnswerSegment& segment, i64 key) {
    const u64 hashed = HPS_ROW_FILES ? share_hash(key) : mix(key);
    const u32 bin = static_cast<u32>(static_cast<float>(static_cast<u32>(key)) * segment.bins_per_row);
    const bool by_key = segment.bins_per_row > 0 && static_cast<u64>(key) >> 32 == 0 && bin < MOST_BINS;
    return by_key ? bin >> (MOST_BIN_BITS - request.bin_bits) : static_cast<u32>(hashed >> (64 - request.bin_bits));
}

// The phases of many misses. `warp` numbers the warps of the grid, of which there are `warps`.

__device__ __forceinline__ void mark(const Answer& request, u32 slot_mask, u32 warp, u32 warps) {
    const Parts parts(request, request.missing_counts, 32);
    const u32 lane = threadIdx.x % 32;
    for (u32 part = warp; part < parts.total; part += warps) {
        u32 s, first, entries;
        parts.find(part, s, first, entries);
        const AnswerSegment& segment = request.segments[s];
        if (segment.layout == nullptr || lane >= entries) continue;
        const u32 begin = segment.missing, end = begin + request.missing_counts[segment.index], i = begin + first + lane;
        const i64 key = request.missing_keys[i];
        const u64 hashed = mix(key);
        u32 leader = i, slot = (static_cast<u32>(hashed >> 8) + s * 0x9E3779B9u) & slot_mask;
        for (;; slot = (slot + 1) & slot_mask) {
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
            const u32 bin = s << request.bin_bits | bin_of(request, segment, key);
            request.ranks[i] = atomicAdd(request.bins + bin, 1);
        }
    }
}

// Note the versions of all stripes of the attached tables; `before`: those of a first look, or null.
__device__ __forceinline__ void read_versions(const Answer& request, u64* versions, const u64* before, u32 warp, u32 warps) {
    for (u32 i = 32 * warp + threadIdx.x % 32; i < request.segment_count << STRIPE_BITS; i += 32 * warps) {
        const AnswerSegment& segment = request.segments[i >> STRIPE_BITS];
        if (segment.layout == nullptr) continue;
        const HostLayout* const layout = reinterpret_cast<const HostLayout*>(load_word(segment.layout));
        const u32 stripe = i & ((1 << STRIPE_BITS) - 1);
        u64 version = 1;
#if HPS_ROW_FILES
        if (layout != nullptr && layout->versions == 0) version = version_without_map(layout);
#endif
        if (layout != nullptr && layout->versions != 0) version = load_host_word(layout->versions + VERSION_BYTES * stripe);
        versions[i] = version;
        if (before != nullptr && version != before[i]) request.progress->mends = 1;
    }
}

__device__ __forceinline__ void place(const Answer& request, u32 block, u32 warp, u32 warps) {
    __shared__ u32 starts[MOST_BINS + 1], sums[WARPS];
    constexpr u32 EACH = MOST_BINS / HPS_THREADS;  // bins of a thread
    const u32 lane = threadIdx.x % 32, bins = request.segment_count << request.bin_bits;
    u32 counts[EACH], own_sum = 0;
#pragma unroll
    for (u32 b = 0; b < EACH; ++b) {
        const u32 bin = threadIdx.x * EACH + b;
        own_sum += bin < bins ? request.bins[bin] : 0;
        counts[b] = own_sum;
    }
    const u32 sum = sum_to(own_sum, lane);
    if (lane == 31) sums[threadIdx.x / 32] = sum;
    __syncthreads();
    u32 before = sum - own_sum;
    for (u32 w = 0; w < threadIdx.x / 32; ++w) before += sums[w];
#pragma unroll
    for (u32 b = 0; b < EACH; ++b) starts[threadIdx.x * EACH + b + 1] = before + counts[b];
    if (threadIdx.x == 0) starts[0] = 0;
    __syncthreads();
    if (block == 0 && threadIdx.x < request.segment_count) {
        const AnswerSegment& segment = request.segments[threadIdx.x];
        const u32 first = threadIdx.x << request.bin_bits;
        request.leader_counts[segment.index] = starts[first + (1u << request.bin_bits)] - starts[first];
        request.epochs[threadIdx.x] = segment.layout == nullptr ? 1 : load_acquire(&segment.link->epoch);
    }
    const Parts parts(request, request.missing_counts, 32);
    for (u32 part = warp; part < parts.total; part += warps) {
        u32 s, first, entries;
        parts.find(part, s, first, entries);
        const AnswerSegment& segment = request.segments[s];
        if (segment.layout == nullptr || lane >= entries) continue;
        const u32 i = segment.missing + first + lane;
        if (request.leaders[i] != i) continue;
        const i64 key = request.missing_keys[i];
        const u32 in_bin = bin_of(request, segment, key);
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
__device__ __forceinline__ void read_leaders(const Answer& request, u32* to, u32 warp, u32 warps) {
    const Parts parts(request, request.leader_counts, READ_AT_ONCE);
    const u32 lane = threadIdx.x % 32, tile = lane / 4;
#pragma unroll 1
    for (u32 part = warp; part < parts.total; part += warps) {
        u32 s, first, entries;
        parts.find(part, s, first, entries);
        const AnswerSegment& segment = request.segments[s];
        bool asks = tile < entries;
        const u32 leader = asks ? request.order[segment.missing + first + tile] : 0;
        const i64 key = asks ? request.missing_keys[leader] : 0;
        u64 version = asks ? (LOOKS ? request.versions_after : request.versions)[stripe_of(s, key)] : 1;
        if (LOOKS) {
            asks = asks && (request.states[leader] == LEFT || version != request.versions[stripe_of(s, key)]);
            if (!__any_sync(FULL_WARP, asks)) continue;
        }
        __syncwarp();
        if (asks && lane % 4 == 0) to[tile] = request.missing_positions[leader];
        __syncwarp();
        u32 state = read_rows<LOOKS>(request, segment, nullptr, key, asks, version, to, first, [](bool) {});
        if (!LOOKS && version & 1) state = LEFT;
        if (!LOOKS && asks && state == LEFT) request.progress->mends = 1;
        if (asks && lane % 4 == 0) request.states[leader] = state;
    }
}

// Hand the rows to all that ask for them.
__device__ __forceinline__ void spread(const Answer& request, u32 warp, u32 warps) {
    const Parts parts(request, request.missing_counts, 32);
    const u32 lane = threadIdx.x % 32;
#pragma unroll 1
    for (u32 part = warp; part < parts.total; part += warps) {
        u32 s, first, entries;
        parts.find(part, s, first, entries);
        const AnswerSegment& segment = request.segments[s];
        const bool asks = lane < entries;
        const u32 i = segment.missing + first + lane, units = units_of(segment.units);
        u32 leader = i, state = LEFT, position = 0, source = 0;
        if (asks) {
            position = request.missing_positions[i];
            if (segment.layout != nullptr) {
                leader = request.leaders[i];
                state = request.states[leader];
                source = request.missing_positions[leader];
            }
        }
        for (u32 to = __ballot_sync(FULL_WARP, asks && state == FOUND && leader != i); to; to &= to - 1) {
            const u32 from = __shfl_sync(FULL_WARP, source, __ffs(to) - 1), row = __shfl_sync(FULL_WARP, position, __ffs(to) - 1);
            for (u32 unit = lane; unit < units; unit += 32) {
                segment.out[static_cast<u64>(row) * units + unit] = segment.out[static_cast<u64>(from) * units + unit];
            }
        }
        conclude(request, segment, asks, state, i, position);
    }
}

__device__ __forceinline__ void admit_leaders(const Answer& request, Admissions& counts, u32 warp, u32 warps) {
    const Parts parts(request, request.leader_counts, TILES);
    const u32 tile = threadIdx.x % 32 / TILE;
#pragma unroll 1
    for (u32 part = warp; part < parts.total; part += warps) {
        u32 s, first, entries;
        parts.find(part, s, first, entries);
        const AnswerSegment& segment = request.segments[s];
        if (!caches(segment)) continue;
        const bool asks = tile < entries;
        const u32 leader = asks ? request.order[segment.missing + first + tile] : 0;
        const bool found = asks && request.states[leader] == FOUND;
        const i64 key = found ? request.missing_keys[leader] : 0;
        const u32 row = found ? request.missing_positions[leader] : 0;
        admit_keys(segment, counts, found, key, row, first + tile, request.epochs[s]);
    }
}

#if HPS_ROW_FILES
constexpr u32 MANY = 1 << 17;  // misses
#endif
constexpr u32 MARK = 0, PLACE = 1, FETCH = 2, CHECK = 3, MEND = 4, SPREAD = 5, PHASES = 6;

__device__ __forceinline__ void answer_many(const Answer& request, u32 misses, u32* to, Admissions& counts) {
    __shared__ u32 drawn;
    // The phase waits for the warp with the longest search: of 30,000 keys in 65,536 slots one finds 20 taken, in 131,072 slots 7.
    const u32 slot_mask = (1u << min(34 - __clz(misses - 1), static_cast<int>(request.slot_bits))) - 1;
#if HPS_ROW_FILES
    // Between two records that a warp reads stand two reads of the device's memory; more warps hide them, if their rows are close.
    const u32 many = request.fetch_warps >> 16, fetch_warps = misses >= MANY && many ? many : request.fetch_warps & 0xffff;
#else
    const u32 fetch_warps = request.fetch_warps;
#endif
    u32 reached = MARK;
#pragma unroll 1
    for (;;) {
        if (threadIdx.x == 0) drawn = atomicAdd(&request.progress->tickets, 1);
        __syncthreads();
        const u32 phase = drawn / gridDim.x, block = drawn % gridDim.x;
        if (phase >= PHASES) break;
        if (phase > reached) {
            if (threadIdx.x == 0) {
                while (load_acquire(&request.progress->done) < phase * gridDim.x) __nanosleep(20);
            }
            reached = phase;
        }
        __syncthreads();
        const u32 warp = threadIdx.x / 32, of_grid = block * WARPS + warp, warps = gridDim.x * WARPS;
        if (phase == MARK) {
            read_versions(request, request.versions, nullptr, of_grid, warps);
            mark(request, slot_mask, of_grid, warps);
        }
        if (phase == PLACE) place(request, block, of_grid, warps);
        if (phase == FETCH && warp < fetch_warps) {
            read_leaders<false>(request, to, block * fetch_warps + warp, gridDim.x * fetch_warps);
        }
        if (phase == CHECK) read_versions(request, request.versions_after, request.versions, of_grid, warps);
        if (phase == MEND && load_acquire(&request.progress->mends)) read_leaders<true>(request, to, of_grid, warps);
        if (phase == SPREAD) {
            spread(request, of_grid, warps);
            if (!request.defers) admit_leaders(request, counts, of_grid, warps);
            for (u32 i = block * HPS_THREADS + threadIdx.x; i <= slot_mask; i += gridDim.x * HPS_THREADS) request.slots[i] = 0;
            if (block == 0) {
                for (u32 i = threadIdx.x; i < request.segment_count << request.bin_bits; i += HPS_THREADS) request.bins[i] = 0;
            }
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            __threadfence();
            atomicAdd(&request.progress->done, 1);
        }
    }
}

// Tell the host, which waits for the number, that all is answered; after a barrier behind all that it reads.
__device__ __forceinline__ void tell(const Answer& request) {
    if (threadIdx.x != 0 || request.done == nullptr) return;
    __threadfence_system();
    asm volatile("st.release.sys.global.u64 [%0], %1;" : : "l"(request.done), "l"(request.number) : "memory");
}

__device__ __forceinline__ void clear_leaders(const Answer& request) {
    request.leader_counts[request.segments[threadIdx.x].index] = 0;
}

// End a block's part of the answers: the last block reports, and leaves everything as the next launch needs it.
__device__ __forceinline__ void finish(const Answer& request, const Parts& parts, u32 misses) {
    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        last = atomicAdd(&request.progress->finished, 1) == min(gridDim.x, parts.total) - 1;
        __threadfence();
    }
    __syncthreads();
    if (!last) return;
    if (threadIdx.x < request.segment_count) {
        const u32 index = request.segments[threadIdx.x].index;
        volatile uint2* const tally = request.tallies + index;
        request.reports[index] = make_uint2(tally->x, tally->y);
        if (!request.settles && *static_cast<volatile u32*>(request.left_counts + index)) *request.any_left = 1;
        tally->x = tally->y = 0;
        request.missing_counts[index] = 0;
        if (misses <= request.few) clear_leaders(request);
    }
    if (threadIdx.x == 0) *request.progress = {0, 0, 0, 0};
    __syncthreads();
    tell(request);
}

extern "C" __global__ void __launch_bounds__(HPS_THREADS, HPS_MIN_BLOCKS) answer(const __grid_constant__ Answer request) {
    const Early early(request);
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" : : : "memory");  // for the query
#endif
    const Parts parts(request, request.missing_counts, FEW_A_WARP);
    if (blockIdx.x >= parts.total) {
        if (blockIdx.x == 0 && threadIdx.x < request.segment_count) clear_leaders(request);
        if (blockIdx.x == 0) tell(request);
        return;
    }
    const u32 misses = __shfl_sync(FULL_WARP, sum_to(parts.count, threadIdx.x % 32), 31);
    __shared__ u32 positions[WARPS][READ_AT_ONCE];
    __shared__ Admissions counts[WARPS];
    u32* const to = positions[threadIdx.x / 32];
#if HPS_ROW_FILES
    __shared__ u64* running;
    if (threadIdx.x == 0) {
        running = nullptr;
        for (u32 s = 0; s < request.segment_count && running == nullptr; ++s) {  // all links of a cache have the same
            if (request.segments[s].link != nullptr) running = enter_readers(request.segments[s].link->readers);
        }
    }
    __syncthreads();
#endif
    Read read{};
    if (misses <= request.few) {
        read = answer_few(request, early, parts, to, counts[threadIdx.x / 32]);
    } else {
        answer_many(request, misses, to, counts[threadIdx.x / 32]);
    }
    // Whoever waits for the answers alone does not wait for the last admissions.
#pragma unroll 1
    for (u32 turn = 0; turn < 2; ++turn) {
        if (turn == (request.done == nullptr ? 0 : 1)) admit_read(request, read, counts[threadIdx.x / 32]);
        if (turn == 0) finish(request, parts, misses);
    }
#if HPS_ROW_FILES
    __syncthreads();
    if (threadIdx.x == 0 && running != nullptr) leave_readers(running);
#endif
}

extern "C" __global__ void __launch_bounds__(HPS_THREADS, HPS_MIN_BLOCKS) admit_answers(const __grid_constant__ Answer request) {
    __shared__ Admissions counts[WARPS];
    admit_leaders(request, counts[threadIdx.x / 32], blockIdx.x * WARPS + threadIdx.x / 32, gridDim.x * WARPS);
}

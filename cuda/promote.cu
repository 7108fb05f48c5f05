// PURPOSE     Admits samples of keys that queries found at neighbours to the near table of a device.
// ARRAYS      samples (room,) int64, in: min(*sample_count, room) keys, with repetitions. sample_count uint64, in. own_buckets: the
//             device's copy of the buckets of the shared table, and its rows, in. staged (room, width) words: scratch. buckets, rows
//             and counters of the near table, in/out.
// LAUNCH      ceil(room / (HPS_THREADS / 8)) blocks of HPS_THREADS. A tile of 8 lanes owns one sample; tiles past the last have none.
// INVARIANTS  A sample that is not resident in the shared table, or that a writer is changing, is left out. admission.cuh says which
//             others are refused.
// RACES       A row is read as in query.cu. Queries may note more samples meanwhile; those are lost when the count is set to 0.
//             Resident rows do not change meanwhile, but may be evicted (near_tables.py). Queries of the near table notice changes as
//             those of any table do.
// TWIN        hps.cache.cpu.kernels.write

#include "embedding_cache.cuh"
#include "sharing.cuh"
#include "writer.cuh"
#include "admission.cuh"

#ifndef HPS_THREADS
#define HPS_THREADS 256
#endif

struct Promote {
    Table shared;
    Table near;
    uint4* own_buckets;
    const i64* samples;
    const u64* sample_count;
    Piece* staged;
    u32 room;
    u32 padding;
};

static_assert(sizeof(Table) == 48 && sizeof(Promote) == 136, "hps/cache/cuda/kernels.py packs these");

extern "C" __global__ void __launch_bounds__(HPS_THREADS) promote(const __grid_constant__ Promote request) {
    constexpr u32 TILES_OF_BLOCK = HPS_THREADS / TILE;
    const u32 count = static_cast<u32>(min(load_word(request.sample_count), static_cast<u64>(request.room)));
    if (blockIdx.x * TILES_OF_BLOCK >= count) return;
    __shared__ Admissions counts;
    if (threadIdx.x == 0) counts = {0, 0};
    __syncthreads();
    const u32 index = blockIdx.x * TILES_OF_BLOCK + threadIdx.x / TILE, member = threadIdx.x % TILE;
    const u32 pieces = request.shared.width / HPS_PIECE;
    bool pending = index < count;
    const i64 key = pending ? request.samples[index] : 0;
    const u32 pair = pending ? home_in(request.shared, key) / 2 : 0;
    Writer reader(request.shared, pair);  // which owns nothing
    reader.pair = request.own_buckets + static_cast<u64>(pair) * PAIR_PARTS;
    const uint4 part = reader.load(pending);
    const int slot = reader.find(part, key, pending);
    const bool owned = reader.is_owned(part);
    pending = pending && slot >= 0 && !owned;
    fence();
    const u64 row = static_cast<u64>(pair) * (2 * SLOTS) + max(slot, 0);
    const Piece* const from = reinterpret_cast<const Piece*>(request.shared.rows) + row * pieces;
    Piece* const staged = request.staged + static_cast<u64>(index) * pieces;
    if (pending) {
        for (u32 piece = member; piece < pieces; piece += TILE) staged[piece] = load_unit(from + piece);
    }
    fence();
    const uint4 again = reader.load(pending);
    const bool changed = reader.tile_ballot(member % BUCKET_PARTS == 0 && ((again.x ^ part.x) & 0xffff) != 0);
    const int slot_again = reader.find(again, key, pending);
    pending = pending && !changed && slot_again == slot;
    __syncwarp();
    write_keys(request.near, ADMIT, key, pending, staged, pieces, nullptr, 0, counts);
    __syncthreads();
    if (threadIdx.x == 0) counts.add_to(request.near.counters);
}

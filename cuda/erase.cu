// PURPOSE     Makes keys of a table non-resident.
// ARRAYS      keys (n,) int64, in. buckets of the table, in/out. counters, in/out: keys erased are added.
// LAUNCH      Blocks of HPS_THREADS, ceil(n / (HPS_THREADS / 8)) of them. A tile of 8 lanes owns one key. n = 0 is not
//             launched; tiles past a ragged end have no key.
// INVARIANTS  The slot of an erased key holds the filler and score 0, or is not occupied (static_tables.cuh). Absent keys and duplicates change nothing.
// RACES       A tile writes to a pair only while it owns it (writer.cuh), after it has looked at it again. placement.cuh says which
//             pairs it owns in a static table.
// TWIN        hps.cache.cpu.kernels.erase

#include "embedding_cache.cuh"
#include "static_tables.cuh"
#include "sharing.cuh"
#include "writer.cuh"
#if HPS_STATIC
#include "placement.cuh"
#endif

#ifndef HPS_THREADS
#define HPS_THREADS 256
#endif

struct Erase {
    Table table;
    const i64* keys;
    u32 n;
    u32 padding;
};

static_assert(sizeof(Table) == 48 && sizeof(Erase) == 64, "hps/cache/cuda/kernels.py packs these");

extern "C" __global__ void __launch_bounds__(HPS_THREADS) erase(const __grid_constant__ Erase request) {
    const Table& table = request.table;
#if HPS_STATIC
    const u32 own = blockIdx.x * (HPS_THREADS / TILE) + threadIdx.x / TILE;
    erase_keys(table, own < request.n ? request.keys[own] : 0, own < request.n);
#else
    const u32 index = blockIdx.x * (HPS_THREADS / TILE) + threadIdx.x / TILE;
    bool pending = index < request.n;
    i64 key = 0;
    u32 home = 0;
    if (pending) {
        key = request.keys[index];
        home = home_in(table, key);
    }
    const u32 pair = home / 2;
    Writer writer(table, pair);
    const u32 member = writer.member;
    const uint4 seen = writer.load(pending);
    const bool resident = writer.find(seen, key, pending) >= 0, owned = writer.is_owned(seen);
    pending = pending && (resident || owned);  // the owner of the pair may be about to admit the key

#pragma unroll 1
    for (u32 attempt = 0; __any_sync(FULL_WARP, pending); ++attempt) {
        const bool own = writer.take(pending, attempt);
        if (!__any_sync(FULL_WARP, own)) {
            back_off(attempt);
            continue;
        }
        __syncwarp();
        fence();
        uint4 part = writer.load(own);
        const int slot = writer.find(part, key, own);
        writer.gather_scores(part, slot >= 0);
        const u32 bucket = member / BUCKET_PARTS;
        if (slot >= 0 && member % BUCKET_PARTS == 0) {  // the lanes that hold the headers
            const u32 target = slot / SLOTS, at = slot % SLOTS;
            if (bucket == target) {
                writer.put(key_at(writer.bucket(target), at), filler_of(table, pair));
                writer.put(scores_at(writer.bucket(target)), part.y & ~(15u << (4 * at)));
                add_to(table.counters + 2, 1ull);
            } else if (bucket == home % 2) {
                writer.put(strays_at(writer.bucket(bucket)), static_cast<u8>((part.x >> 24) - 1));
            }
        }
        writer.give_back(own, slot >= 0);
        if (own) pending = false;
    }
#endif
}

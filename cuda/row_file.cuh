// How a kernel reads a table of row files in place (hps/stores/row_files/); pasted after host_table.cuh.
//
// A table has a FILE, which never changes, and perhaps a MAP of the rows that were changed since it was sealed: a hash map as in
// host_table.cuh, whose rows have one more word, which is not 0 where the key was deleted. The map is asked first, between two looks
// at the version of the key's stripe; a key that it lacks has the file's row, without a look. A file and its map are replaced
// together, by another layout, and a map is no longer changed then: whatever a layout says was true while it was the present one.
// No version of one map is ever one of another, so that two equal looks are looks at the same file. A layout may have no map:
// nothing was changed since the file was sealed, and nothing but the file is read.
//
// The buckets' starts and one byte of each hash lie in device memory, and say where a key's record may be. A record is a key and its
// row side by side, so that both come by one translation of an address of the host's memory: the key is compared after its row was
// read, and before it is stored. One record in 256 is read in vain.

#ifndef HPS_ROW_FILES
#define HPS_ROW_FILES 0  // 1: the tables of a launch are of row files
#define HPS_SHARE_SEED 0  // of the hash that orders files, from hps/ground/shares.py
#endif

// The hash that orders the records of a file: share_hash of hps/ground/hashing.py.
__device__ __forceinline__ u64 share_hash(i64 key) {
    return mix(key ^ static_cast<i64>(HPS_SHARE_SEED));
}

constexpr u64 NO_RECORD = ~0ull;
constexpr u32 RECORD = 1;    // beside an address: it is one of a record, whose row follows its key
constexpr u32 KEY_WORDS = 2;
constexpr u32 LINE_PARTS = 8;  // of 128 bytes, the most that is read of the host's memory at once

// Count this block among those that read layouts, before it reads one, or no longer; by one thread. The host frees a layout that
// was replaced once it has found each of the counts 0: a block that it did not see reads the layout that replaced it.
__device__ __forceinline__ u64* enter_readers(Readers* readers) {
    u64* const running = readers->running + (load_word(&readers->phase) & 1);
    atomicAdd(running, 1ull);
    __threadfence();
    return running;
}

__device__ __forceinline__ void leave_readers(u64* running) {
    __threadfence();
    atomicAdd(running, ~0ull);
}

// The records that may have the tiles' keys.
struct Candidates {
    u64 next, stop;

    __device__ __forceinline__ Candidates(const RowFile& file, u64 hashed, bool asks) : next(0), stop(0) {
        const u32 lane = threadIdx.x % 32, tile = lane / 4;
        const u64 bucket = (hashed >> 32) * file.buckets >> 32;
        u32 start = 0;
        if (asks && lane % 4 < 2) start = __ldg(file.starts + bucket + lane % 4);
        const u32 first = __shfl_sync(FULL_WARP, start, 4 * tile), last = __shfl_sync(FULL_WARP, start, 4 * tile + 1);
        if (!asks) return;
        next = first;
        stop = last;
    }

    // Find the first record from `next` on whose byte is that of the hash, or NO_RECORD; for whole warps.
    __device__ __forceinline__ u64 find(const RowFile& file, u64 hashed, bool asks) {
        const u32 member = threadIdx.x % 4, print = static_cast<u32>(hashed & 0xff) * 0x01010101u;
        u64 found = NO_RECORD;
        bool looks = asks && next < stop;
#pragma unroll 1
        while (__any_sync(FULL_WARP, looks)) {
            const u64 first = next & ~3ull, own = first + 4 * member;  // 16 bytes a tile
            u32 place = 16;
            if (looks && own < stop) {
                const u32 equal = __vcmpeq4(__ldg(reinterpret_cast<const u32*>(file.fingerprints + own)), print);
#pragma unroll
                for (u32 i = 4; i-- > 0;) {
                    if (equal >> (8 * i) & 1 && own + i >= next && own + i < stop) place = 4 * member + i;
                }
            }
            place = min(place, __shfl_xor_sync(FULL_WARP, place, 1));
            place = min(place, __shfl_xor_sync(FULL_WARP, place, 2));
            if (!looks) continue;
            if (place < 16) {
                found = first + place;
                next = found + 1;
                looks = false;
            } else {
                next = first + 16;
                looks = next < stop;
            }
        }
        return found;
    }
};

__device__ __forceinline__ u32 word_of(const uint4& words, u32 index) {
    return index == 0 ? words.x : index == 1 ? words.y : index == 2 ? words.z : words.w;
}

// Four words from the `skipped`th of a part on; the rest are those of the next part.
__device__ __forceinline__ uint4 words_from(u32 skipped, const uint4& part, u32 x, u32 y, u32 z) {
    return skipped == 0   ? part
           : skipped == 1 ? make_uint4(part.y, part.z, part.w, x)
           : skipped == 2 ? make_uint4(part.z, part.w, x, y)
                          : make_uint4(part.w, x, y, z);
}

// How many parts of a row the first load of a turn reads. Of a long row, those up to the end of a line, so that no line is asked for
// twice.
__device__ __forceinline__ u32 early_parts(u64 source) {
    return HPS_LONG_PARTS ? HPS_PART_LANES - static_cast<u32>(source) / 16 % LINE_PARTS : HPS_PART_LANES;
}

// Read rows in parts of 16 bytes, as copy_parts does, of records together with their keys. `source` is that of the tile's row, or of
// its record and RECORD; `key` is the one that a record is to have. Where it has another one, nothing is stored, and the tile's bit
// of `matched` is 0.
template <typename Store>
__device__ __forceinline__ u32 copy_records(u64 source, i64 key, u32 width, u32& matched, Store store) {
    constexpr u32 LANES = HPS_PART_LANES, ROWS_AT_ONCE = 32 / LANES, TURNS = READ_AT_ONCE / ROWS_AT_ONCE;
    static_assert(!HPS_LONG_PARTS || LANES == 32, "a line is less than half of what a row's lanes read");
    constexpr u32 OWNED = HPS_LONG_PARTS ? 2 * LANES - LINE_PARTS : LANES;  // parts of a turn; the next one is handed on
    const u32 lane = threadIdx.x % 32, member = lane % LANES, group = lane / LANES;
    u32 copied = 0;
    matched = 0;
#pragma unroll 1
    for (u32 first = 0; first == 0 || (HPS_LONG_PARTS && 4 * first < width + KEY_WORDS + 3); first += OWNED) {
        uint4 data[TURNS], more[HPS_LONG_PARTS ? TURNS : 1];
        u64 from[TURNS];
        u32 last[TURNS];
#pragma unroll
        for (u32 t = 0; t < TURNS; ++t) {
            const u32 tile = t * ROWS_AT_ONCE + group;
            from[t] = __shfl_sync(FULL_WARP, source, 4 * tile);
            if (HPS_LONG_PARTS && first != 0 && !(matched >> tile & 1)) from[t] = 0;
            const u32 skipped = static_cast<u32>(from[t]) / 4 % 4 + (from[t] & RECORD ? KEY_WORDS : 0), end = skipped + width;
            const u32 early = early_parts(from[t]), part = first + member;
            data[t] = make_uint4(0, 0, 0, 0);
            if (from[t] && member < early && 4 * part < end) data[t] = load_host_part((from[t] & ~15ull) + 16 * part);
            if (HPS_LONG_PARTS) {
                more[t] = make_uint4(0, 0, 0, 0);
                if (from[t] && 4 * (part + early) < end) more[t] = load_host_part((from[t] & ~15ull) + 16 * (part + early));
                last[t] = 0;
                if (OCCURS<INT8> && from[t]) last[t] = load_host_half((from[t] & ~15ull) + 4 * (end - 1));
            }
        }
#pragma unroll
        for (u32 t = 0; t < TURNS; ++t) {
            const u32 tile = t * ROWS_AT_ONCE + group;
            const uint4 d = data[t], m = more[HPS_LONG_PARTS ? t : 0];
            const u32 early = early_parts(from[t]);
            const bool wraps = HPS_LONG_PARTS && member == 0;  // what follows the last early part is the first lane's other one
            const u32 beside = group * LANES + (member + 1 < early ? member + 1 : 0);
            const u32 x = __shfl_sync(FULL_WARP, wraps ? m.x : d.x, beside), y = __shfl_sync(FULL_WARP, wraps ? m.y : d.y, beside),
                      z = __shfl_sync(FULL_WARP, wraps ? m.z : d.z, beside);
            copied |= d.x | (HPS_LONG_PARTS ? m.x | last[t] : 0);
            const bool is_record = from[t] & RECORD;
            const u32 skipped = static_cast<u32>(from[t]) / 4 % 4 + (is_record ? KEY_WORDS : 0);
            if (first == 0) {
                const i64 sought = __shfl_sync(FULL_WARP, key, 4 * tile);
                const uint4 head = words_from((skipped - KEY_WORDS) & 3, d, x, y, z);
                const bool good = member == 0 && from[t] && (!is_record || key_of(head.x, head.y) == sought);
                const u32 who = __ballot_sync(FULL_WARP, good);
#pragma unroll
                for (u32 g = 0; g < ROWS_AT_ONCE; ++g) matched |= (who >> (g * LANES) & 1) << (t * ROWS_AT_ONCE + g);
            }
            if (!HPS_LONG_PARTS) {
                const u32 place = skipped + width - 1;
                last[t] = OCCURS<INT8> ? __shfl_sync(FULL_WARP, word_of(d, place % 4), group * LANES + place / 4 % LANES) : 0;
            }
            const bool stores = matched >> tile & 1;
            const u32 part = first + member - skipped / 4;  // of the row; before the first one it is larger than any
            if (stores && member < early && part < (width + 3) / 4) store(tile, part, words_from(skipped % 4, d, x, y, z), last[t]);
            if (HPS_LONG_PARTS) {
                const u32 x2 = __shfl_down_sync(FULL_WARP, m.x, 1), y2 = __shfl_down_sync(FULL_WARP, m.y, 1),
                          z2 = __shfl_down_sync(FULL_WARP, m.z, 1);
                if (stores && member + early < OWNED && part + early < (width + 3) / 4) {
                    store(tile, part + early, words_from(skipped % 4, m, x2, y2, z2), last[t]);
                }
            }
        }
    }
    return copied;
}

// The version of all stripes of a layout without a map.
__device__ __forceinline__ u64 version_without_map(const HostLayout* layout) {
    return layout->file.number << 33;
}

// Read the rows of up to 8 keys, as read_host does. `width` is that of a row; `copy(source, matched)` reads as copy_records does.
template <bool LOOKS, typename Copy>
__device__ __forceinline__ u32 read_row_file(const HostLayout* const* where, i64 key, bool asks, u64 version, u32 width, u32 patience,
                                             u32 zero, Copy copy) {
    const u32 tile = threadIdx.x % 32 / 4;
    const u64 hashed = mix(key), in_file = share_hash(key);
    u32 state = LEFT;
#pragma unroll 1
    for (u32 attempt = 0; attempt < patience && __any_sync(FULL_WARP, asks); ++attempt) {
        const HostLayout* const layout = reinterpret_cast<const HostLayout*>(load_word(where));
        if (layout == nullptr) break;
        const bool has_map = layout->versions != 0;
        const u64 version_at = layout->versions + VERSION_BYTES * (hashed >> (64 - STRIPE_BITS));
        Look look{0, true, false};
        bool deleted = false;
        if (has_map) {
            if (LOOKS) version = first_look(layout, version_at, hashed, version, asks, attempt);
            const bool probes = asks && version != version_without_map(layout);  // the first one: no key of the stripe has changed
            look = look_up(layout, key, dense_row_at(layout, key, probes), hashed, version, probes);
            look.absent |= asks && !probes;
            if (look.source) deleted = load_host_half(look.source + 4 * width);
        }
        const RowFile& file = layout->file;
        bool searches = asks && look.absent && file.rows != 0, found = look.source && !deleted;
        u64 source = found ? look.source : 0;
        Candidates candidates(file, in_file, searches);
        u32 copied = deleted;
        acquire_from_host();
#pragma unroll 1
        for (;;) {
            const u64 record = candidates.find(file, in_file, searches);
            searches = searches && record != NO_RECORD;
            if (searches) source = file.records + record * file.record_bytes + RECORD;
            if (!__any_sync(FULL_WARP, source != 0)) break;
            u32 matched;
            copied |= copy(source, matched);
            source = 0;
            if (searches && matched >> tile & 1) {
                found = true;
                searches = false;
            }
            if (!__any_sync(FULL_WARP, searches)) break;
        }
        if (!has_map || !LOOKS) {
            if (asks && !look.moved) state = found ? FOUND : ABSENT;
            break;
        }
        const u32 late = __any_sync(FULL_WARP, copied & zero);  // 0, once all rows are here
        acquire_from_host();
        const u64 again = second_look(layout, version_at + late, hashed, version, asks, [] {});
        if (asks && again == version && (version & 1) == 0 && !look.moved) {
            state = found ? FOUND : ABSENT;
            asks = false;
        }
        if (asks && look.moved && again == version && load_word(where) == reinterpret_cast<u64>(layout)) asks = false;
        version = again;
    }
    return state;
}

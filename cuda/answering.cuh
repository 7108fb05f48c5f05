// How misses are answered from attached tables, and admitted to the cache; pasted after admission.cuh, host_table.cuh and
// row_file.cuh, into answer.cu and, for few keys, into query.cu. Request and Segment are those of the kernel; table_of(segment) is
// the segment's table of the cache.

// Rows are read by parts, and admitted from the staged ones alone.
constexpr bool BY_PARTS = PACKED || HPS_OUT != 0 || HPS_ROW_FILES;

// Finish misses that were read, one a lane: give default vectors to those that no tier has, or nobody may wait for, list those
// that are left, and count; for whole warps. `position` is that of the key's row.
template <typename Request, typename Segment>
__device__ __forceinline__ void conclude(const Request& request, const Segment& segment, bool asks, u32 state, i64 key,
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
        if (lane == 0) {
            place = atomicAdd(request.left_counts + segment.index, __popc(left));
            *request.any_left = 1;
        }
        place = segment.missing + __shfl_sync(FULL_WARP, place, 0) + __popc(left & ((1u << lane) - 1));
        if (is_left) {
            request.left_keys[place] = key;
            request.left_positions[place] = position;
        }
    }
    if (lane != 0) return;
    if (request.settles) {
        atomicAdd(segment.link->counters, static_cast<u64>(__popc(found | absent | left)));
        if (found) atomicAdd(segment.link->counters + 1, static_cast<u64>(__popc(found)));
        if (absent) atomicAdd(segment.link->counters + 2, static_cast<u64>(__popc(absent)));
        if (left) atomicAdd(segment.link->counters + 3, static_cast<u64>(__popc(left)));
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
template <typename Segment>
__device__ __forceinline__ void store_part(const Segment& segment, const u32* to, u32 first, u32 of, u32 part, const uint4& words,
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
template <bool LOOKS, typename Request, typename Segment>
__device__ __forceinline__ u32 read_rows(const Request& request, const Segment& segment, i64 key, bool asks, u64 version,
                                         const u32* to, u32 first) {
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
    return read_host<LOOKS>(segment.layout, key, asks, version, request.patience, request.zero, copy);
#endif
}

// Admit up to 4 keys that were found, one a tile of 8 lanes; for whole warps. `row` is the key's among `out`, `staged_row` among
// the staged ones.
template <typename Segment>
__device__ __forceinline__ void admit_keys(const Segment& segment, Admissions& counts, bool chosen, i64 key, u32 row, u32 staged_row,
                                           u64 epoch) {
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
    write_keys(table_of(segment), ADMIT, key, pending, vector, pieces, &segment.link->epoch, epoch, counts);
    __syncwarp();
    if (threadIdx.x % 32 == 0) counts.add_to(table_of(segment).counters);
    __syncwarp();
}

// Rows in fewer bits than float32, and outputs of them, as hps/ground/rows.py describes them; pasted after embedding_cache.cuh.
//
// A lane that moves UNIT elements reads them in one load wherever a row begins, and, of int8, the word with scale and offset in
// another, which all lanes of the row share. It widens them in registers. Of tables of several formats in one launch, a segment's
// word `units` has the format in its upper bits. What is read of a row that a writer changes meanwhile is any number, and never kept.

#ifndef HPS_FORMATS
#define HPS_FORMATS 1  // bit f: some table has rows of format f
#endif
#ifndef HPS_OUT
#define HPS_OUT 0  // format of the outputs' elements: FLOAT32, FLOAT16 or BFLOAT16
#endif

constexpr u32 FLOAT32 = 0, FLOAT16 = 1, BFLOAT16 = 2, INT8 = 3;
constexpr u32 FORMAT_SHIFT = 28;
constexpr bool PACKED = HPS_FORMATS != 1;
constexpr bool MIXED = (HPS_FORMATS & (HPS_FORMATS - 1)) != 0;

template <u32 FORMAT>
constexpr bool OCCURS = (HPS_FORMATS >> FORMAT & 1) != 0;

__device__ __forceinline__ u32 units_of(u32 word) {
    return MIXED ? word & ((1u << FORMAT_SHIFT) - 1) : word;
}

__device__ __forceinline__ u32 format_of(u32 word) {
    return MIXED ? word >> FORMAT_SHIFT : OCCURS<FLOAT16> ? FLOAT16 : OCCURS<BFLOAT16> ? BFLOAT16 : OCCURS<INT8> ? INT8 : FLOAT32;
}

// Words of a row.
__device__ __forceinline__ u32 width_of(u32 format, u32 dim) {
    return format == FLOAT32 ? dim : format == INT8 ? (dim + 3) / 4 + 1 : (dim + 1) / 2;
}

// NaN is the same here as on the CPU.
__device__ __forceinline__ float half_to_float(u32 half) {
    float v;
    asm("{.reg .b16 h; cvt.u16.u32 h, %1; cvt.f32.f16 %0, h;}" : "=f"(v) : "r"(half));
    return v == v ? v : __uint_as_float(0x7fc00000u);
}

struct Scale {
    float factor, offset;

    explicit __device__ __forceinline__ Scale(u32 word) : factor(half_to_float(word & 0xffff)), offset(half_to_float(word >> 16)) {}

    // Element i of four codes. Exact but for the sum: 8 times 11 bits.
    __device__ __forceinline__ float widen(u32 codes, u32 i) const {
        return fmaf(__uint_as_float(__byte_perm(codes, 0x4b000000u, 0x7540u + i)) - 8388608.0f, factor, offset);
    }
};

template <u32 FORMAT>
__device__ __forceinline__ float widen_half(u32 half) {
    return FORMAT == FLOAT16 ? half_to_float(half) : __uint_as_float(half << 16);
}

// Loads of memory that others may be changing, and of memory that no other thread uses.

struct SharedMemory {
    static __device__ __forceinline__ u32 load_8(const u8* at) {
        u32 v;
        asm volatile("ld.relaxed." SCOPE ".global.u8 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
        return v;
    }
    static __device__ __forceinline__ u32 load_16(const u8* at) {
        u16 v;
        asm volatile("ld.relaxed." SCOPE ".global.u16 %0, [%1];" : "=h"(v) : "l"(at) : "memory");
        return v;
    }
    static __device__ __forceinline__ u32 load_32(const u8* at) {
        u32 v;
        asm volatile("ld.relaxed." SCOPE ".global.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
        return v;
    }
    static __device__ __forceinline__ u64 load_64(const u8* at) { return load_word(at); }
    static __device__ __forceinline__ Unit load(const Unit* at) { return load_unit(at); }
};

struct OwnMemory {
    static __device__ __forceinline__ u32 load_8(const u8* at) { return __ldcs(at); }
    static __device__ __forceinline__ u32 load_16(const u8* at) { return __ldcs(reinterpret_cast<const u16*>(at)); }
    static __device__ __forceinline__ u32 load_32(const u8* at) { return __ldcs(reinterpret_cast<const u32*>(at)); }
    static __device__ __forceinline__ u64 load_64(const u8* at) { return __ldcs(reinterpret_cast<const u64*>(at)); }
    static __device__ __forceinline__ Unit load(const Unit* at) { return stream_in(at); }
};

// UNIT elements as a row has them.
template <u32 FORMAT, typename Memory>
struct Stored {
    u32 low, high;
    u32 scale;

    __device__ __forceinline__ void load(const u8* row, u32 unit, u32 dim) {
        constexpr u32 BYTES = FORMAT == INT8 ? UNIT : 2 * UNIT;
        const u8* const at = row + unit * BYTES;
        high = 0;
        if constexpr (BYTES == 8) {
            const u64 both = Memory::load_64(at);
            low = static_cast<u32>(both);
            high = static_cast<u32>(both >> 32);
        } else {
            low = BYTES == 4 ? Memory::load_32(at) : BYTES == 2 ? Memory::load_16(at) : Memory::load_8(at);
        }
        scale = FORMAT == INT8 ? Memory::load_32(row + (dim + 3) / 4 * 4) : 0;
    }

    // Some bits that depend on all that was loaded.
    __device__ __forceinline__ u32 bits() const { return low | scale; }

    __device__ __forceinline__ Unit widened() const {
        Unit v;
        if constexpr (FORMAT == INT8) {
            const Scale by(scale);
#pragma unroll
            for (u32 i = 0; i < UNIT; ++i) v.value[i] = by.widen(low, i);
        } else {
#pragma unroll
            for (u32 i = 0; i < UNIT; ++i) v.value[i] = widen_half<FORMAT>((i < 2 ? low : high) >> (16 * (i % 2)) & 0xffff);
        }
        return v;
    }
};

template <typename Memory>
struct Stored<FLOAT32, Memory> {
    Unit unit;

    __device__ __forceinline__ void load(const u8* row, u32 unit_of_row, u32) {
        unit = Memory::load(reinterpret_cast<const Unit*>(row) + unit_of_row);
    }
    __device__ __forceinline__ u32 bits() const { return __float_as_uint(unit.value[0]); }
    __device__ __forceinline__ Unit widened() const { return unit; }
};

// Outputs.

#if HPS_OUT == 0
using OutUnit = Unit;

__device__ __forceinline__ OutUnit narrowed(const Unit& v) { return v; }
#else
struct alignas(2 * HPS_UNIT) OutUnit {
    u16 value[HPS_UNIT];
};

__device__ __forceinline__ u16 narrowed(float v) {
    u16 bits;
    if (HPS_OUT == FLOAT16) {
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(v));
    } else {
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(v));
    }
    return bits;
}

__device__ __forceinline__ OutUnit narrowed(const Unit& v) {
    OutUnit out;
#pragma unroll
    for (u32 i = 0; i < UNIT; ++i) out.value[i] = narrowed(v.value[i]);
    return out;
}

__device__ __forceinline__ void stream_out(OutUnit* at, const OutUnit& v) {
    if constexpr (UNIT == 4) {
        asm volatile("st.global.cs.v4.u16 [%0], {%1, %2, %3, %4};"
                     :
                     : "l"(at), "h"(v.value[0]), "h"(v.value[1]), "h"(v.value[2]), "h"(v.value[3])
                     : "memory");
    } else if constexpr (UNIT == 2) {
        asm volatile("st.global.cs.v2.u16 [%0], {%1, %2};" : : "l"(at), "h"(v.value[0]), "h"(v.value[1]) : "memory");
    } else {
        asm volatile("st.global.cs.u16 [%0], %1;" : : "l"(at), "h"(v.value[0]) : "memory");
    }
}
#endif

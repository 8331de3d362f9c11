// The integers of ints.h on aarch64. Sums of products of four bytes: SMMLA for two rows at once (FOREBAY_I8MM), SDOT
// (FOREBAY_DOTPROD), or products of 16 bits that are added in pairs.
#pragma once

#include "simd.h"

struct Ints {
    int32x4_t lo, hi;
};

FOREBAY_INLINE Ints set1_int(int32_t x) { return {vdupq_n_s32(x), vdupq_n_s32(x)}; }
FOREBAY_INLINE Ints load_ints(const void* p) {
    const auto* bytes = static_cast<const int8_t*>(p);
    return {vreinterpretq_s32_s8(vld1q_s8(bytes)), vreinterpretq_s32_s8(vld1q_s8(bytes + 16))};
}
FOREBAY_INLINE void store_ints(void* p, Ints a) {
    auto* bytes = static_cast<int8_t*>(p);
    vst1q_s8(bytes, vreinterpretq_s8_s32(a.lo));
    vst1q_s8(bytes + 16, vreinterpretq_s8_s32(a.hi));
}
FOREBAY_INLINE Ints operator+(Ints a, Ints b) { return {vaddq_s32(a.lo, b.lo), vaddq_s32(a.hi, b.hi)}; }
FOREBAY_INLINE Ints operator&(Ints a, Ints b) { return {vandq_s32(a.lo, b.lo), vandq_s32(a.hi, b.hi)}; }
FOREBAY_INLINE Ints operator|(Ints a, Ints b) { return {vorrq_s32(a.lo, b.lo), vorrq_s32(a.hi, b.hi)}; }
FOREBAY_INLINE Ints max(Ints a, Ints b) { return {vmaxq_s32(a.lo, b.lo), vmaxq_s32(a.hi, b.hi)}; }
FOREBAY_INLINE Vec as_float(Ints a) { return {vreinterpretq_f32_s32(a.lo), vreinterpretq_f32_s32(a.hi)}; }
FOREBAY_INLINE Ints bytes_to_ints(const uint8_t* p) {
    const int16x8_t x = vmovl_s8(vreinterpret_s8_u8(vld1_u8(p)));
    return {vmovl_s16(vget_low_s16(x)), vmovl_s16(vget_high_s16(x))};
}
// Of a table of 16, by bytes below 16.
FOREBAY_INLINE Ints entries(const uint8_t* table, Ints bytes) {
    const uint8x16_t all = vld1q_u8(table);
    return {vreinterpretq_s32_u8(vqtbl1q_u8(all, vreinterpretq_u8_s32(bytes.lo))),
            vreinterpretq_s32_u8(vqtbl1q_u8(all, vreinterpretq_u8_s32(bytes.hi)))};
}
template <int N>
FOREBAY_INLINE Ints shift_left(Ints a) {
    return {vshlq_n_s32(a.lo, N), vshlq_n_s32(a.hi, N)};
}
FOREBAY_INLINE int32x4_t shifted_right(int32x4_t a, int n) {  // n a constant, 0 included
    return vreinterpretq_s32_u32(vshlq_u32(vreinterpretq_u32_s32(a), vdupq_n_s32(-n)));
}
template <int N>
FOREBAY_INLINE Ints shift_right(Ints a) {
    return {shifted_right(a.lo, N), shifted_right(a.hi, N)};
}
template <int N>
FOREBAY_INLINE Ints shift_right_signed(Ints a) {
    return {vshrq_n_s32(a.lo, N), vshrq_n_s32(a.hi, N)};
}
FOREBAY_INLINE Vec to_float(Ints a) { return {vcvtq_f32_s32(a.lo), vcvtq_f32_s32(a.hi)}; }
FOREBAY_INLINE Ints to_ints(Vec a) { return {vcvtnq_s32_f32(a.lo), vcvtnq_s32_f32(a.hi)}; }
// The lowest bytes.
FOREBAY_INLINE void store_bytes(int8_t* p, Ints a) {
    vst1_s8(p, vmovn_s16(vcombine_s16(vmovn_s32(a.lo), vmovn_s32(a.hi))));
}
FOREBAY_INLINE Vec load_float16(const uint8_t* p) {
    const float16x8_t x = vreinterpretq_f16_u8(vld1q_u8(p));
    return {vcvt_f32_f16(vget_low_f16(x)), vcvt_f32_f16(vget_high_f16(x))};
}

// Codes as signed bytes: those of 8 bits are lowered by 128.
template <int BITS>
FOREBAY_INLINE int8x16_t signed_codes(int32x4_t codes) {
    const int8x16_t bytes = vreinterpretq_s8_s32(codes);
    return BITS == 8 ? veorq_s8(bytes, vdupq_n_s8(-128)) : bytes;
}

// sums + the four products in each lane.
template <int BITS>
FOREBAY_INLINE int32x4_t add_fours(int32x4_t sums, int8x16_t codes, int8x16_t x) {
#if defined(FOREBAY_DOTPROD)
    return vdotq_s32(sums, codes, x);
#else
    const int16x8_t low = vmull_s8(vget_low_s8(codes), vget_low_s8(x)), high = vmull_high_s8(codes, x);
    // Two products of 8 bits may be 2 * 128 * 128, more than 16 bits hold.
    if constexpr (BITS == 8) return vaddq_s32(sums, vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high)));
    return vpadalq_s16(sums, vpaddq_s16(low, high));
#endif
}

template <int BITS, int ROWS>
struct Dots {
    static constexpr int kRows = 1, kFours = 1, kLowered = BITS == 8 ? 128 : 0;
    Ints sums;

    FOREBAY_INLINE void clear() { sums = set1_int(0); }
    template <int>
    FOREBAY_INLINE void add(const Ints* codes, const int8_t* x, long) {
        int32_t four;
        std::memcpy(&four, x, sizeof four);
        const int8x16_t fours = vreinterpretq_s8_s32(vdupq_n_s32(four));
        sums.lo = add_fours<BITS>(sums.lo, signed_codes<BITS>(codes->lo), fours);
        sums.hi = add_fours<BITS>(sums.hi, signed_codes<BITS>(codes->hi), fours);
    }
    FOREBAY_INLINE Ints total(int) const { return sums; }
};

#if defined(FOREBAY_I8MM)

// Two rows: SMMLA multiplies them, 8 bytes of each, by 8 codes of two outputs.
template <int BITS, int ROWS>
    requires(ROWS > 1)
struct Dots<BITS, ROWS> {
    static constexpr int kRows = 2, kFours = 2, kLowered = BITS == 8 ? 128 : 0;
    int32x4_t sums[4];  // of outputs 2 * i..: [rows][outputs]

    FOREBAY_INLINE void clear() {
        for (int32x4_t& two : sums) two = vdupq_n_s32(0);
    }
    template <int>
    FOREBAY_INLINE void add(const Ints* codes, const int8_t* x, long ldx) {
        const int8x16_t rows = vcombine_s8(vld1_s8(x), vld1_s8(x + ldx));
        add_two(sums[0], vzip1q_s32(codes[0].lo, codes[1].lo), rows);
        add_two(sums[1], vzip2q_s32(codes[0].lo, codes[1].lo), rows);
        add_two(sums[2], vzip1q_s32(codes[0].hi, codes[1].hi), rows);
        add_two(sums[3], vzip2q_s32(codes[0].hi, codes[1].hi), rows);
    }
    FOREBAY_INLINE Ints total(int row) const { return {joined(sums[0], sums[1], row), joined(sums[2], sums[3], row)}; }

  private:
    FOREBAY_INLINE static void add_two(int32x4_t& two, int32x4_t codes, int8x16_t rows) {
        two = vmmlaq_s32(two, rows, signed_codes<BITS>(codes));
    }
    FOREBAY_INLINE static int32x4_t joined(int32x4_t a, int32x4_t b, int row) {
        return row == 0 ? low_halves(a, b) : high_halves(a, b);
    }
};

#endif

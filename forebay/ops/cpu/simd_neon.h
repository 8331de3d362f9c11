// The vectors of simd.h on aarch64: two registers of NEON are one vector of W = 8 floats. So all kernels have the blocks
// and the order of sums of AVX2, and give its bits; 32 registers of 4 floats hold as many as the 16 of 8 there.
#pragma once

#include <arm_neon.h>

#include "bf16.h"

constexpr int W = 8;

struct Vec {
    float32x4_t lo, hi;
};

// Four entries.
using Quad = float32x4_t;

inline Vec set1(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x)}; }
inline Vec load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
inline void store(float* p, Vec x) {
    vst1q_f32(p, x.lo);
    vst1q_f32(p + 4, x.hi);
}

// bfloat16 by integers, as on x86-64 (simd_x86.h): BFCVT would keep what is no normal number.
inline uint16x4_t narrow_quad(Quad x) {
    const uint32x4_t bits = vreinterpretq_u32_f32(x);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t rounded = vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7fff)), odd);
    const uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x400000));
    const uint32x4_t is_normal = vtstq_u32(bits, vdupq_n_u32(0x7f800000));
    const uint32x4_t signs = vdupq_n_u32(0x80000000);
    const uint32x4_t chosen = vbslq_u32(vceqq_f32(x, x), rounded, quiet);
    return vshrn_n_u32(vandq_u32(chosen, vorrq_u32(is_normal, signs)), 16);
}
inline Quad widen_quad(uint16x4_t x) { return vreinterpretq_f32_u32(vshll_n_u16(x, 16)); }
inline uint16x8_t narrow(Vec x) { return vcombine_u16(narrow_quad(x.lo), narrow_quad(x.hi)); }
inline Vec widen(uint16x8_t x) { return {widen_quad(vget_low_u16(x)), widen_quad(vget_high_u16(x))}; }
inline Vec load(const bf16* p) { return widen(vld1q_u16(&p->bits)); }
inline void store(bf16* p, Vec x) { vst1q_u16(&p->bits, narrow(x)); }

// W integers of 32 bits, also as pairs of bfloat16.
struct Word {
    uint32x4_t lo, hi;
};
inline Word load_word(const void* p) {
    const auto* words = static_cast<const uint32_t*>(p);
    return {vld1q_u32(words), vld1q_u32(words + 4)};
}
inline Vec first_of_pairs(Word x) {
    return {vreinterpretq_f32_u32(vshlq_n_u32(x.lo, 16)), vreinterpretq_f32_u32(vshlq_n_u32(x.hi, 16))};
}
inline Vec second_of_pairs(Word x) {
    const uint32x4_t mask = vdupq_n_u32(0xffff0000);
    return {vreinterpretq_f32_u32(vandq_u32(x.lo, mask)), vreinterpretq_f32_u32(vandq_u32(x.hi, mask))};
}
// Of these bits.
inline Vec as_floats(Word x) { return {vreinterpretq_f32_u32(x.lo), vreinterpretq_f32_u32(x.hi)}; }
// The byte number i of each integer.
inline Quad signed_byte_of_quad(uint32x4_t x, int i) {
    return vcvtq_f32_s32(vshrq_n_s32(vshlq_s32(vreinterpretq_s32_u32(x), vdupq_n_s32(24 - 8 * i)), 24));
}
inline Vec signed_byte(Word x, int i) { return {signed_byte_of_quad(x.lo, i), signed_byte_of_quad(x.hi, i)}; }

inline Vec load(const int8_t* p) {
    const int16x8_t x = vmovl_s8(vld1_s8(p));
    return {vcvtq_f32_s32(vmovl_s16(vget_low_s16(x))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(x)))};
}

inline Vec operator+(Vec a, Vec b) { return {vaddq_f32(a.lo, b.lo), vaddq_f32(a.hi, b.hi)}; }
inline Vec operator-(Vec a, Vec b) { return {vsubq_f32(a.lo, b.lo), vsubq_f32(a.hi, b.hi)}; }
inline Vec operator*(Vec a, Vec b) { return {vmulq_f32(a.lo, b.lo), vmulq_f32(a.hi, b.hi)}; }
inline Vec operator/(Vec a, Vec b) { return {vdivq_f32(a.lo, b.lo), vdivq_f32(a.hi, b.hi)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {vfmaq_f32(c.lo, a.lo, b.lo), vfmaq_f32(c.hi, a.hi, b.hi)}; }
// As on x86-64 the second operand if one is NaN: FMAX and FMIN would return the NaN.
inline Quad max_quad(Quad a, Quad b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
inline Quad min_quad(Quad a, Quad b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
inline Vec max(Vec a, Vec b) { return {max_quad(a.lo, b.lo), max_quad(a.hi, b.hi)}; }
inline Vec min(Vec a, Vec b) { return {min_quad(a.lo, b.lo), min_quad(a.hi, b.hi)}; }
inline Vec round(Vec a) { return {vrndnq_f32(a.lo), vrndnq_f32(a.hi)}; }

// x * 2^n, n integral in -252..254: in two halves, since 2^n alone may not be a normal number.
inline Quad scale_quad_by_power(Quad x, Quad n) {
    const int32x4_t whole = vcvtnq_s32_f32(n);
    const int32x4_t low = vshrq_n_s32(whole, 1);
    const int32x4_t high = vsubq_s32(whole, low);
    const auto power = [](int32x4_t e) {
        return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(e, vdupq_n_s32(127)), 23));
    };
    return vmulq_f32(vmulq_f32(x, power(low)), power(high));
}
inline Vec scale_by_power(Vec x, Vec n) { return {scale_quad_by_power(x.lo, n.lo), scale_quad_by_power(x.hi, n.hi)}; }
inline Quad zero_quad_where(uint32x4_t lanes, Quad x) {
    return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(x), lanes));
}
inline Vec zero_where_below(Vec x, Vec compared, Vec bound) {
    return {zero_quad_where(vcltq_f32(compared.lo, bound.lo), x.lo),
            zero_quad_where(vcltq_f32(compared.hi, bound.hi), x.hi)};
}

// A bit for each lane.
inline unsigned lane_bits(uint32x4_t lo, uint32x4_t hi) {
    const uint32x4_t bits = {1, 2, 4, 8};
    return vaddvq_u32(vandq_u32(lo, bits)) | vaddvq_u32(vandq_u32(hi, bits)) << 4;
}
inline unsigned equal_lanes(Vec a, Vec b) { return lane_bits(vceqq_f32(a.lo, b.lo), vceqq_f32(a.hi, b.hi)); }
inline unsigned nan_lanes(Vec a) { return equal_lanes(a, a) ^ 0xff; }
inline unsigned at_least_lanes(Vec a, Vec b) { return lane_bits(vcgeq_f32(a.lo, b.lo), vcgeq_f32(a.hi, b.hi)); }
inline float hmax(Vec a) {
    Quad x = max_quad(a.lo, a.hi);
    x = max_quad(x, vextq_f32(x, x, 2));
    return max_quad(x, vextq_f32(x, x, 1))[0];
}

inline Quad load_quad(const float* p) { return vld1q_f32(p); }
inline Quad load_quad(const bf16* p) { return widen_quad(vld1_u16(&p->bits)); }
inline void store_quad(float* p, Quad x) { vst1q_f32(p, x); }
inline void store_quad(bf16* p, Quad x) { vst1_u16(&p->bits, narrow_quad(x)); }

// The lane sums of four vectors at once, in the order of AVX2's.
inline Quad hsum4(Vec a, Vec b, Vec c, Vec d) {
    return vaddq_f32(vpaddq_f32(vpaddq_f32(a.lo, b.lo), vpaddq_f32(c.lo, d.lo)),
                     vpaddq_f32(vpaddq_f32(a.hi, b.hi), vpaddq_f32(c.hi, d.hi)));
}

// The lower or upper 64 bits of two vectors.
template <class Lanes>
inline Lanes low_halves(Lanes a, Lanes b) {
    return (Lanes)vzip1q_u64((uint64x2_t)a, (uint64x2_t)b);
}
template <class Lanes>
inline Lanes high_halves(Lanes a, Lanes b) {
    return (Lanes)vzip2q_u64((uint64x2_t)a, (uint64x2_t)b);
}

// What FlushToZero sets, and how.
constexpr uint64_t kFlushToZero = 1u << 24;
inline uint64_t float_mode() {
    uint64_t mode;
    asm volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
}
inline void set_float_mode(uint64_t mode) { asm volatile("msr fpcr, %0" ::"r"(mode) : "memory"); }

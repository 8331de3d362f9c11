// The vectors of simd.h on x86-64: AVX-512 or AVX2 with FMA.
#pragma once

#include <immintrin.h>

#include "bf16.h"

// bfloat16 by integers, as the instruction for it does: to nearest even; a NaN keeps its sign and becomes quiet; what is
// no normal number becomes a zero of its sign.
inline __m128i narrow_by_integers(__m256 x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    const __m256i exponent = _mm256_and_si256(bits, _mm256_set1_epi32(0x7f800000));
    const __m256i is_tiny = _mm256_cmpeq_epi32(exponent, _mm256_setzero_si256());
    const __m256i magnitude = _mm256_and_si256(is_tiny, _mm256_set1_epi32(0x7fffffff));
    const __m256i chosen =
        _mm256_srli_epi32(_mm256_andnot_si256(magnitude, _mm256_blendv_epi8(rounded, quiet, is_nan)), 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(chosen), _mm256_extracti128_si256(chosen, 1));
}

#if defined(__AVX512F__)

constexpr int W = 16;

struct Vec {
    __m512 v;
};

inline Vec set1(float x) { return {_mm512_set1_ps(x)}; }
inline Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, Vec x) { _mm512_storeu_ps(p, x.v); }
inline __mmask16 first_lanes(long n) { return static_cast<__mmask16>((1u << n) - 1); }
inline Vec load_n(const float* p, long n) { return {_mm512_maskz_loadu_ps(first_lanes(n), p)}; }
inline void store_n(float* p, Vec x, long n) { _mm512_mask_storeu_ps(p, first_lanes(n), x.v); }

inline Vec widen(__m256i x) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16))}; }
#if defined(FOREBAY_BF16)
inline __m256i narrow(Vec x) { return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x.v)); }
inline __m128i narrow_quad(__m128 x) { return reinterpret_cast<__m128i>(_mm_cvtneps_pbh(x)); }
#else
inline __m256i narrow(Vec x) {  // narrow_by_integers
    const __m512i bits = _mm512_castps_si512(x.v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    const __mmask16 is_nan = _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q);
    const __mmask16 is_tiny = _mm512_testn_epi32_mask(bits, _mm512_set1_epi32(0x7f800000));
    const __m512i quieted = _mm512_mask_or_epi32(rounded, is_nan, bits, _mm512_set1_epi32(0x400000));
    const __m512i chosen = _mm512_mask_and_epi32(quieted, is_tiny, bits, _mm512_set1_epi32(INT32_MIN));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(chosen, 16));
}
inline __m128i narrow_quad(__m128 x) { return narrow_by_integers(_mm256_castps128_ps256(x)); }
#endif
inline Vec load(const bf16* p) { return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline void store(bf16* p, Vec x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(x)); }
inline Vec load_n(const bf16* p, long n) { return widen(_mm256_maskz_loadu_epi16(first_lanes(n), p)); }
inline void store_n(bf16* p, Vec x, long n) { _mm256_mask_storeu_epi16(p, first_lanes(n), narrow(x)); }

// W integers of 32 bits, also as pairs of bfloat16.
using Word = __m512i;
inline Word load_word(const void* p) { return _mm512_loadu_si512(p); }
inline Vec first_of_pairs(Word x) { return {_mm512_castsi512_ps(_mm512_slli_epi32(x, 16))}; }
inline Vec second_of_pairs(Word x) {
    return {_mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(-65536)))};
}

inline Vec load(const int8_t* p) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
inline Vec load_n(const int8_t* p, long n) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(first_lanes(n), p)))};
}

inline Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Vec min(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }
inline Vec round(Vec a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }

// x * 2^n, n integral; underflows gradually to zero.
inline Vec scale_by_power(Vec x, Vec n) { return {_mm512_scalef_ps(x.v, n.v)}; }
inline Vec zero_where_below(Vec x, Vec compared, Vec bound) {
    return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(compared.v, bound.v, _CMP_NLT_UQ), x.v)};
}

// Per 128 bits the sums of a, b, c and d.
inline __m256 partial_sums4(Vec a, Vec b, Vec c, Vec d) {
    const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a.v, b.v), _mm512_unpackhi_ps(a.v, b.v));
    const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c.v, d.v), _mm512_unpackhi_ps(c.v, d.v));
    const __m512 all = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
    return _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
}
inline float hmax(Vec a) { return _mm512_reduce_max_ps(a.v); }
inline unsigned nan_lanes(Vec a) { return _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q); }
inline unsigned equal_lanes(Vec a, Vec b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_EQ_OQ); }
inline unsigned at_least_lanes(Vec a, Vec b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ); }

#else

constexpr int W = 8;

struct Vec {
    __m256 v;
};

inline Vec set1(float x) { return {_mm256_set1_ps(x)}; }
inline Vec load(const float* p) { return {_mm256_loadu_ps(p)}; }
inline void store(float* p, Vec x) { _mm256_storeu_ps(p, x.v); }

inline Vec widen(__m128i x) { return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16))}; }
inline __m128i narrow(Vec x) { return narrow_by_integers(x.v); }
inline __m128i narrow_quad(__m128 x) { return narrow({_mm256_castps128_ps256(x)}); }
inline Vec load(const bf16* p) { return widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline void store(bf16* p, Vec x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow(x)); }

// W integers of 32 bits, also as pairs of bfloat16.
using Word = __m256i;
inline Word load_word(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline Vec first_of_pairs(Word x) { return {_mm256_castsi256_ps(_mm256_slli_epi32(x, 16))}; }
inline Vec second_of_pairs(Word x) {
    return {_mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32(-65536)))};
}

inline Vec load(const int8_t* p) {
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))))};
}

inline Vec operator+(Vec a, Vec b) { return {_mm256_add_ps(a.v, b.v)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm256_sub_ps(a.v, b.v)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm256_div_ps(a.v, b.v)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
inline Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.v, b.v)}; }
inline Vec min(Vec a, Vec b) { return {_mm256_min_ps(a.v, b.v)}; }
inline Vec round(Vec a) { return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }

// x * 2^n, n integral in -252..254: in two halves, since 2^n alone may not be a normal number.
inline Vec scale_by_power(Vec x, Vec n) {
    const __m256i whole = _mm256_cvtps_epi32(n.v);
    const __m256i low = _mm256_srai_epi32(whole, 1);
    const __m256i high = _mm256_sub_epi32(whole, low);
    const auto power = [](__m256i e) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(e, _mm256_set1_epi32(127)), 23));
    };
    return {_mm256_mul_ps(_mm256_mul_ps(x.v, power(low)), power(high))};
}
inline Vec zero_where_below(Vec x, Vec compared, Vec bound) {
    return {_mm256_and_ps(x.v, _mm256_cmp_ps(compared.v, bound.v, _CMP_NLT_UQ))};
}

// Per 128 bits the sums of a, b, c and d.
inline __m256 partial_sums4(Vec a, Vec b, Vec c, Vec d) {
    return _mm256_hadd_ps(_mm256_hadd_ps(a.v, b.v), _mm256_hadd_ps(c.v, d.v));
}
inline unsigned nan_lanes(Vec a) { return _mm256_movemask_ps(_mm256_cmp_ps(a.v, a.v, _CMP_UNORD_Q)); }
inline unsigned equal_lanes(Vec a, Vec b) { return _mm256_movemask_ps(_mm256_cmp_ps(a.v, b.v, _CMP_EQ_OQ)); }
inline unsigned at_least_lanes(Vec a, Vec b) { return _mm256_movemask_ps(_mm256_cmp_ps(a.v, b.v, _CMP_GE_OQ)); }
inline float hmax(Vec a) {
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    x = _mm_max_ss(x, _mm_shuffle_ps(x, x, 1));
    return _mm_cvtss_f32(x);
}

#endif

// Of these bits.
inline Vec as_floats(Word x) { return {reinterpret_cast<decltype(Vec::v)>(x)}; }
// The byte number i of each integer.
inline Vec signed_byte(Word x, int i) {
    using Ints = int __attribute__((vector_size(4 * W)));
    using Floats = float __attribute__((vector_size(4 * W)));
    return {__builtin_convertvector((Ints)x << (24 - 8 * i) >> 24, Floats)};
}

// Four entries.
using Quad = __m128;
inline Quad load_quad(const float* p) { return _mm_loadu_ps(p); }
inline Quad load_quad(const bf16* p) {
    return _mm_castsi128_ps(_mm_slli_epi32(_mm_cvtepu16_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))), 16));
}
inline void store_quad(float* p, Quad x) { _mm_storeu_ps(p, x); }
inline void store_quad(bf16* p, Quad x) { _mm_storel_epi64(reinterpret_cast<__m128i*>(p), narrow_quad(x)); }

// The lane sums of four vectors at once: a dot product of a head costs more in its last sum than in its products.
inline Quad hsum4(Vec a, Vec b, Vec c, Vec d) {
    const __m256 sums = partial_sums4(a, b, c, d);
    return _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1));
}

// What FlushToZero sets, and how.
constexpr unsigned kFlushToZero = _MM_FLUSH_ZERO_ON | _MM_DENORMALS_ZERO_ON;
inline unsigned float_mode() { return _mm_getcsr(); }
inline void set_float_mode(unsigned mode) { _mm_setcsr(mode); }

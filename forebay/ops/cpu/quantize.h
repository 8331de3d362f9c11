// Rows of x as int8 codes by groups of 32, as linear_q.h lays them out.
//
// Of each group scale = largest |x| / 127 and code = x * (127 / largest), rounded to nearest even. A group with nothing
// above kSmallest counts as zeros; one with an infinity or a NaN has the scale NaN, which makes its row NaN.
#pragma once

#include "linear_q.h"

constexpr float kSmallest = 1e-30f;  // far above where 127 / largest overflows

struct GroupScale {
    float scale;
    float inverse;
};

// `bits`: of the largest |x|. As integers they are in the order of the values, with infinity and NaN above all.
inline GroupScale group_scale(int32_t bits) {
    constexpr int32_t kInfinity = 0x7f800000;
    if (bits >= kInfinity) return {std::numeric_limits<float>::quiet_NaN(), 0.0f};
    float largest;
    std::memcpy(&largest, &bits, sizeof largest);
    if (largest < kSmallest) return {0.0f, 0.0f};
    return {largest / 127.0f, 127.0f / largest};
}

#if defined(__AVX512F__)

// Writes the 32 codes and returns their sum.
template <class T>
FOREBAY_INLINE int32_t quantize_group(const T* x, int8_t* codes, float* scale) {
    const __m512 low = load(x).v, high = load(x + 16).v;
    const __m512i sign_off = _mm512_set1_epi32(0x7fffffff);
    const __m512i largest = _mm512_max_epi32(_mm512_and_si512(_mm512_castps_si512(low), sign_off),
                                             _mm512_and_si512(_mm512_castps_si512(high), sign_off));
    const GroupScale by = group_scale(_mm512_reduce_max_epi32(largest));
    // Where the scale is NaN nothing may come of infinity * 0.
    const __mmask16 finite = by.inverse != 0.0f ? 0xffff : 0;
    const __m512 inverse = _mm512_set1_ps(by.inverse);
    const __m512i a = _mm512_maskz_cvtps_epi32(finite, _mm512_mul_ps(low, inverse));
    const __m512i b = _mm512_maskz_cvtps_epi32(finite, _mm512_mul_ps(high, inverse));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(codes), _mm512_cvtepi32_epi8(a));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + 16), _mm512_cvtepi32_epi8(b));
    *scale = by.scale;
    return _mm512_reduce_add_epi32(_mm512_add_epi32(a, b));
}

#else

template <class T>
FOREBAY_INLINE int32_t quantize_group(const T* x, int8_t* codes, float* scale) {
    float values[kGroup];
    int32_t bits[kGroup];
    for (long i = 0; i < kGroup; i += W) store(values + i, load(x + i));
    std::memcpy(bits, values, sizeof bits);
    int32_t largest = 0;
    for (const int32_t b : bits) largest = std::max(largest, b & 0x7fffffff);
    const GroupScale by = group_scale(largest);
    int32_t rounded[kGroup] = {};
    if (by.inverse != 0.0f) {
        for (long i = 0; i < kGroup; i += W) {
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(rounded + i),
                                _mm256_cvtps_epi32((load(values + i) * set1(by.inverse)).v));
        }
    }
    int32_t sum = 0;
    for (long i = 0; i < kGroup; ++i) {
        codes[i] = static_cast<int8_t>(rounded[i]);
        sum += rounded[i];
    }
    *scale = by.scale;
    return sum;
}

#endif

// Quantizes x [count][groups * 32] into a tile of `rows`, whose rows beyond `count` become zeros.
template <class T>
void quantize_tile(const T* x, long ldx, long count, long groups, long rows, char* tile) {
    for (long g = 0; g < groups; ++g) {
        auto* codes = reinterpret_cast<int8_t*>(tile + g * RowTile::group_bytes(rows));
        auto* scales = reinterpret_cast<float*>(codes + rows * kGroup);
        auto* sums = scales + rows;
        auto* code_sums = reinterpret_cast<int32_t*>(sums + rows);
        for (long r = 0; r < count; ++r) {
            code_sums[r] = quantize_group(x + r * ldx + g * kGroup, codes + r * kGroup, scales + r);
            sums[r] = scales[r] * static_cast<float>(code_sums[r]);
        }
        std::memset(codes + count * kGroup, 0, (rows - count) * kGroup);
        std::fill(scales + count, scales + rows, 0.0f);
        std::fill(sums + count, sums + rows, 0.0f);
        std::fill(code_sums + count, code_sums + rows, 0);
    }
}

// Entries of 16 bits in AVX-512 registers, on their way into tiles.
#pragma once

#include "bf16.h"
#include "simd.h"

inline __mmask32 first_halves(long n) { return n >= 32 ? ~0u : n <= 0 ? 0u : (1u << n) - 1; }

// Entries `dim` and on of a head, as many of 32 as there are, and zeros.
inline __m512i load_halves(const bf16* head, long dim, long head_dim) {
    return _mm512_maskz_loadu_epi16(first_halves(head_dim - dim), head + dim);
}
// Every integer of 8 bits is a bfloat16.
inline __m512i load_halves(const int8_t* head, long dim, long head_dim) {
    const __m256i bytes = _mm256_maskz_loadu_epi8(first_halves(head_dim - dim), head + dim);
    const auto widened = [](__m128i x) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(x)); };
    return reinterpret_cast<__m512i>(
        _mm512_cvtne2ps_pbh(widened(_mm256_extracti128_si256(bytes, 1)), widened(_mm256_castsi256_si128(bytes))));
}

// Transposes 16 rows of four 32-bit entries: put(i, all rows' entry i). Four different rows are brought together by the
// loads, so that only the 4 x 4 transposes within 128 bits are left to the shuffle port.
template <class Put>
FOREBAY_INLINE void transpose_quarter(const char* rows, long stride_bytes, const Put& put) {
    __m512i v[4];
    for (int r = 0; r < 4; ++r) {
        const auto part = [&](int row) {
            return _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows + row * stride_bytes));
        };
        v[r] = _mm512_castsi128_si512(part(r));
        v[r] = _mm512_inserti32x4(v[r], part(r + 4), 1);
        v[r] = _mm512_inserti32x4(v[r], part(r + 8), 2);
        v[r] = _mm512_inserti32x4(v[r], part(r + 12), 3);
    }
    const __m512i a = _mm512_unpacklo_epi32(v[0], v[1]), b = _mm512_unpackhi_epi32(v[0], v[1]);
    const __m512i c = _mm512_unpacklo_epi32(v[2], v[3]), d = _mm512_unpackhi_epi32(v[2], v[3]);
    put(0, _mm512_unpacklo_epi64(a, c));
    put(1, _mm512_unpackhi_epi64(a, c));
    put(2, _mm512_unpacklo_epi64(b, d));
    put(3, _mm512_unpackhi_epi64(b, d));
}

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

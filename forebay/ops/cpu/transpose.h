// Rows to columns, for vectors of 32-bit entries.
#pragma once

#include "simd.h"

#if defined(__aarch64__)

inline Word unpack_low32(Word a, Word b) { return {vzip1q_u32(a.lo, b.lo), vzip1q_u32(a.hi, b.hi)}; }
inline Word unpack_high32(Word a, Word b) { return {vzip2q_u32(a.lo, b.lo), vzip2q_u32(a.hi, b.hi)}; }
inline Word unpack_low64(Word a, Word b) { return {low_halves(a.lo, b.lo), low_halves(a.hi, b.hi)}; }
inline Word unpack_high64(Word a, Word b) { return {high_halves(a.lo, b.lo), high_halves(a.hi, b.hi)}; }

// Rows r and r + 4, 16 bytes of each. at(row) is where a row lies.
template <class At>
FOREBAY_INLINE Word every_fourth_row(int r, const At& at) {
    const auto part = [&](int row) { return vreinterpretq_u32_u8(vld1q_u8(reinterpret_cast<const uint8_t*>(at(row)))); };
    return {part(r), part(r + 4)};
}

#elif defined(__AVX512F__)

inline Word unpack_low32(Word a, Word b) { return _mm512_unpacklo_epi32(a, b); }
inline Word unpack_high32(Word a, Word b) { return _mm512_unpackhi_epi32(a, b); }
inline Word unpack_low64(Word a, Word b) { return _mm512_unpacklo_epi64(a, b); }
inline Word unpack_high64(Word a, Word b) { return _mm512_unpackhi_epi64(a, b); }

// Rows r, r + 4, r + 8 and r + 12, 16 bytes of each. at(row) is where a row lies.
template <class At>
FOREBAY_INLINE Word every_fourth_row(int r, const At& at) {
    const auto part = [&](int row) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(at(row))); };
    Word rows = _mm512_castsi128_si512(part(r));
    rows = _mm512_inserti32x4(rows, part(r + 4), 1);
    rows = _mm512_inserti32x4(rows, part(r + 8), 2);
    return _mm512_inserti32x4(rows, part(r + 12), 3);
}

#else

inline Word unpack_low32(Word a, Word b) { return _mm256_unpacklo_epi32(a, b); }
inline Word unpack_high32(Word a, Word b) { return _mm256_unpackhi_epi32(a, b); }
inline Word unpack_low64(Word a, Word b) { return _mm256_unpacklo_epi64(a, b); }
inline Word unpack_high64(Word a, Word b) { return _mm256_unpackhi_epi64(a, b); }

// Rows r and r + 4, 16 bytes of each. at(row) is where a row lies.
template <class At>
FOREBAY_INLINE Word every_fourth_row(int r, const At& at) {
    const auto part = [&](int row) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(at(row))); };
    return _mm256_inserti128_si256(_mm256_castsi128_si256(part(r)), part(r + 4), 1);
}

#endif

// Transposes W rows of four 32-bit entries: put(i, all rows' entry i). Different rows are brought together by the loads,
// so that only the 4 x 4 transposes within 128 bits are left to the shuffle port.
template <class At, class Put>
FOREBAY_INLINE void transpose_quads(const At& at, const Put& put) {
    Word v[4];
    for (int r = 0; r < 4; ++r) v[r] = every_fourth_row(r, at);
    const Word a = unpack_low32(v[0], v[1]), b = unpack_high32(v[0], v[1]);
    const Word c = unpack_low32(v[2], v[3]), d = unpack_high32(v[2], v[3]);
    put(0, unpack_low64(a, c));
    put(1, unpack_high64(a, c));
    put(2, unpack_low64(b, d));
    put(3, unpack_high64(b, d));
}

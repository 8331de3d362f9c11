// The integers of ints.h on x86-64.
#pragma once

#include "simd.h"

#if defined(__AVX512F__)

struct Ints {
    __m512i v;
};

// The compiler would sum in a tree, whose leaves do not fit in the registers.
FOREBAY_INLINE Ints in_order(Ints a) {
    asm("" : "+v"(a.v));
    return a;
}
FOREBAY_INLINE Ints set1_int(int32_t x) { return {_mm512_set1_epi32(x)}; }
FOREBAY_INLINE Ints load_ints(const void* p) { return {_mm512_loadu_si512(p)}; }
FOREBAY_INLINE void store_ints(void* p, Ints a) { _mm512_storeu_si512(p, a.v); }
FOREBAY_INLINE Ints operator+(Ints a, Ints b) { return {_mm512_add_epi32(a.v, b.v)}; }
FOREBAY_INLINE Ints operator&(Ints a, Ints b) { return {_mm512_and_si512(a.v, b.v)}; }
FOREBAY_INLINE Ints operator|(Ints a, Ints b) { return {_mm512_or_si512(a.v, b.v)}; }
FOREBAY_INLINE Ints max(Ints a, Ints b) { return {_mm512_max_epi32(a.v, b.v)}; }
FOREBAY_INLINE Vec as_float(Ints a) { return {_mm512_castsi512_ps(a.v)}; }  // of these bits
FOREBAY_INLINE Ints bytes_to_ints(const uint8_t* p) {
    return {_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
// Of a table of 16, by the lowest four bits of each byte.
FOREBAY_INLINE Ints entries(const uint8_t* table, Ints bytes) {
    return {_mm512_shuffle_epi8(_mm512_broadcast_i32x4(*reinterpret_cast<const __m128i*>(table)), bytes.v)};
}
template <int N>
FOREBAY_INLINE Ints shift_left(Ints a) {
    return {_mm512_slli_epi32(a.v, N)};
}
template <int N>
FOREBAY_INLINE Ints shift_right(Ints a) {
    return {_mm512_srli_epi32(a.v, N)};
}
template <int N>
FOREBAY_INLINE Ints shift_right_signed(Ints a) {
    return {_mm512_srai_epi32(a.v, N)};
}
FOREBAY_INLINE Vec to_float(Ints a) { return {_mm512_cvtepi32_ps(a.v)}; }
FOREBAY_INLINE Ints to_ints(Vec a) { return {_mm512_cvtps_epi32(a.v)}; }
// The lowest bytes.
FOREBAY_INLINE void store_bytes(int8_t* p, Ints a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a.v));
}
FOREBAY_INLINE Vec load_float16(const uint8_t* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
#if defined(FOREBAY_VNNI)
FOREBAY_INLINE Ints add_fours(Ints sums, Ints codes, Ints x) { return {_mm512_dpbusd_epi32(sums.v, codes.v, x.v)}; }
#endif
FOREBAY_INLINE Ints add_pairs(Ints sums, Ints codes, Ints x) {
    return in_order({_mm512_add_epi16(sums.v, _mm512_maddubs_epi16(codes.v, x.v))});
}
FOREBAY_INLINE Ints join_pairs(Ints sums, int16_t factor) {
    return {_mm512_madd_epi16(sums.v, _mm512_set1_epi16(factor))};
}

#else

struct Ints {
    __m256i v;
};

// The compiler would sum in a tree, whose leaves do not fit in the registers.
FOREBAY_INLINE Ints in_order(Ints a) {
    asm("" : "+x"(a.v));
    return a;
}
FOREBAY_INLINE Ints set1_int(int32_t x) { return {_mm256_set1_epi32(x)}; }
FOREBAY_INLINE Ints load_ints(const void* p) { return {_mm256_loadu_si256(static_cast<const __m256i*>(p))}; }
FOREBAY_INLINE void store_ints(void* p, Ints a) { _mm256_storeu_si256(static_cast<__m256i*>(p), a.v); }
FOREBAY_INLINE Ints operator+(Ints a, Ints b) { return {_mm256_add_epi32(a.v, b.v)}; }
FOREBAY_INLINE Ints operator&(Ints a, Ints b) { return {_mm256_and_si256(a.v, b.v)}; }
FOREBAY_INLINE Ints operator|(Ints a, Ints b) { return {_mm256_or_si256(a.v, b.v)}; }
FOREBAY_INLINE Ints max(Ints a, Ints b) { return {_mm256_max_epi32(a.v, b.v)}; }
FOREBAY_INLINE Vec as_float(Ints a) { return {_mm256_castsi256_ps(a.v)}; }  // of these bits
FOREBAY_INLINE Ints bytes_to_ints(const uint8_t* p) {
    return {_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)))};
}
FOREBAY_INLINE Ints entries(const uint8_t* table, Ints bytes) {
    return {_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(*reinterpret_cast<const __m128i*>(table)), bytes.v)};
}
template <int N>
FOREBAY_INLINE Ints shift_left(Ints a) {
    return {_mm256_slli_epi32(a.v, N)};
}
template <int N>
FOREBAY_INLINE Ints shift_right(Ints a) {
    return {_mm256_srli_epi32(a.v, N)};
}
template <int N>
FOREBAY_INLINE Ints shift_right_signed(Ints a) {
    return {_mm256_srai_epi32(a.v, N)};
}
FOREBAY_INLINE Vec to_float(Ints a) { return {_mm256_cvtepi32_ps(a.v)}; }
FOREBAY_INLINE Ints to_ints(Vec a) { return {_mm256_cvtps_epi32(a.v)}; }
FOREBAY_INLINE void store_bytes(int8_t* p, Ints a) {
    const __m256i lowest = _mm256_and_si256(a.v, _mm256_set1_epi32(0xff));
    const __m128i halves = _mm_packus_epi32(_mm256_castsi256_si128(lowest), _mm256_extracti128_si256(lowest, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packus_epi16(halves, halves));
}
FOREBAY_INLINE Vec load_float16(const uint8_t* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
#if defined(FOREBAY_VNNI)
FOREBAY_INLINE Ints add_fours(Ints sums, Ints codes, Ints x) {
    return {_mm256_dpbusd_avx_epi32(sums.v, codes.v, x.v)};
}
#endif
FOREBAY_INLINE Ints add_pairs(Ints sums, Ints codes, Ints x) {
    return in_order({_mm256_add_epi16(sums.v, _mm256_maddubs_epi16(codes.v, x.v))});
}
FOREBAY_INLINE Ints join_pairs(Ints sums, int16_t factor) {
    return {_mm256_madd_epi16(sums.v, _mm256_set1_epi16(factor))};
}

#endif

FOREBAY_INLINE Ints set1_four(const int8_t* x) {
    int32_t four;
    std::memcpy(&four, x, sizeof four);
    return set1_int(four);
}

#if defined(FOREBAY_VNNI)

template <int BITS, int ROWS>
struct Dots {
    static constexpr int kRows = 1, kFours = 1, kLowered = 0;
    Ints sums;

    FOREBAY_INLINE void clear() { sums = set1_int(0); }
    template <int>
    FOREBAY_INLINE void add(const Ints* codes, const int8_t* x, long) {
        sums = add_fours(sums, *codes, set1_four(x));
    }
    FOREBAY_INLINE Ints total(int) const { return sums; }
};

#else

// Sums of 16 bits hold 8 x 2 products of codes of 4 bits, 15 * 128 * 16 at most, half as many of 5 bits, and a quarter of 6
// bits: for these the first and the last half of the products are summed apart, of which 6 bits have four in all. Wider
// codes are summed in two parts.
template <int BITS, int ROWS>
struct Dots {
    static constexpr int kRows = 1, kFours = 1, kLowered = 0;
    Ints low, high;

    FOREBAY_INLINE void clear() { low = high = set1_int(0); }
    template <int FOUR>
    FOREBAY_INLINE void add(const Ints* codes, const int8_t* x, long) {
        const Ints four = set1_four(x);
        if constexpr (BITS <= 6) {
            static_assert(BITS < 6 || FOUR < 4);
            Ints& sums = (BITS == 5 && FOUR >= 4) || (BITS == 6 && FOUR >= 2) ? high : low;
            sums = add_pairs(sums, *codes, four);
        } else {
            const Ints mask = set1_int(0x0f0f0f0f);
            low = add_pairs(low, *codes & mask, four);
            high = add_pairs(high, shift_right<4>(*codes) & mask, four);
        }
    }
    FOREBAY_INLINE Ints total(int) const {
        if constexpr (BITS <= 4) return join_pairs(low, 1);
        return join_pairs(low, 1) + join_pairs(high, BITS <= 6 ? 1 : 16);
    }
};

#endif

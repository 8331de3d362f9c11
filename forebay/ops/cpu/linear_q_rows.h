// A few rows by one panel of a quantized weight: a stream of the weight, with the sums in registers.
#pragma once

#include "linear_q.h"

constexpr long kPrefetchBytes = 4096;  // ahead of what is read, within a thread's panels

// quad[q]: W outputs of one quad of inputs, 4 bytes each.
#if defined(__AVX512F__)

constexpr int kFewRows = 4;
using Codes32 = __m512i;

template <class C>
FOREBAY_INLINE void load_codes(const uint8_t* half, Codes32 (&quad)[kQuads]) {
    if constexpr (C::kBits == 4) {
        const __m512i low = _mm512_set1_epi8(15);
        for (long q = 0; q < 4; ++q) {
            const __m512i both = _mm512_loadu_si512(half + q * 64);
            quad[q] = _mm512_and_si512(both, low);
            quad[q + 4] = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
        }
    } else {
        // The instruction multiplies unsigned by signed: 128 is added here and taken off by way of the zero.
        const __m512i top = _mm512_set1_epi8(-128);
        for (long q = 0; q < kQuads; ++q) quad[q] = _mm512_xor_si512(_mm512_loadu_si512(half + q * 64), top);
    }
}

// The dot products of W outputs with one row's group of codes, zero taken off.
FOREBAY_INLINE Vec dot(const Codes32 (&quad)[kQuads], const char* x, int32_t zero_times_sum) {
    __m512i sum = _mm512_set1_epi32(-zero_times_sum);
    for (long q = 0; q < kQuads; ++q) {
        int32_t four;
        std::memcpy(&four, x + q * 4, 4);
        sum = _mm512_dpbusd_epi32(sum, quad[q], _mm512_set1_epi32(four));
    }
    return to_floats(sum);
}

#else

constexpr int kFewRows = 2;
using Codes32 = __m256i;

template <class C>
FOREBAY_INLINE void load_codes(const uint8_t* half, Codes32 (&quad)[kQuads]) {
    const auto at = [half](long q) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(half + q * 64)); };
    if constexpr (C::kBits == 4) {
        const __m256i low = _mm256_set1_epi8(15);
        for (long q = 0; q < 4; ++q) {
            quad[q] = _mm256_and_si256(at(q), low);
            quad[q + 4] = _mm256_and_si256(_mm256_srli_epi16(at(q), 4), low);
        }
    } else {
        for (long q = 0; q < kQuads; ++q) quad[q] = at(q);
    }
}

// As above. Pairs are summed in 16 bits: |weight| * sign(weight) x, at most 2 * 128 * 127, does not saturate.
FOREBAY_INLINE Vec dot(const Codes32 (&quad)[kQuads], const char* x, int32_t zero_times_sum) {
    __m256i sum = _mm256_set1_epi32(-zero_times_sum);
    for (long q = 0; q < kQuads; ++q) {
        int32_t four;
        std::memcpy(&four, x + q * 4, 4);
        const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(quad[q]),
                                                   _mm256_sign_epi8(_mm256_set1_epi32(four), quad[q]));
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }
    return to_floats(sum);
}

#endif

// What is to be taken off a dot product for each unit of the sum of x's codes.
template <class C>
inline int32_t offset_of(const CodeHeader& header) {
    if constexpr (C::kBits == 4) return header.zero;
    return W == 16 ? 128 : 0;
}

// x has ROWS rows; sums [ROWS][32], bias not added.
template <class C, int ROWS>
void few_rows(const uint8_t* panel, const RowTile& x, long groups, int32_t offset, float* sums) {
    constexpr int kVecs = kPanel / W;
    Vec sum[ROWS][kVecs];
    for (auto& row : sum) {
        for (auto& s : row) s = zero();
    }
    for (long g = 0; g < groups; ++g, panel += C::kBlock) {
        for (long line = 0; line < C::kBlock; line += 64) {
            _mm_prefetch(reinterpret_cast<const char*>(panel) + kPrefetchBytes + line, _MM_HINT_T0);
        }
        const char* codes = x.group(g);
        for (int v = 0; v < kVecs; ++v) {
            Codes32 quad[kQuads];
            load_codes<C>(panel + v * W / kHalf * C::kHalfCodes + v * W % kHalf * 4, quad);
            const Vec scale = load_half(panel + C::kScalesAt + v * W * 2);
            for (int r = 0; r < ROWS; ++r) {
                const Vec products = dot(quad, codes + r * kGroup, offset * x.code_sums(g)[r]);
                sum[r][v] = add_products(sum[r][v], products, scale, set1(x.scales(g)[r]));
                if constexpr (C::kMinimums) {
                    sum[r][v] = add_minimums(sum[r][v], load_half(panel + C::kMinimumsAt + v * W * 2),
                                             set1(x.sums(g)[r]));
                }
            }
        }
    }
    for (int r = 0; r < ROWS; ++r) {
        for (int v = 0; v < kVecs; ++v) store(sums + r * kPanel + v * W, sum[r][v]);
    }
}

// few_rows for any x.rows up to ROWS.
template <class C, int ROWS = kFewRows>
void up_to_few_rows(const uint8_t* panel, const RowTile& x, long groups, int32_t offset, float* sums) {
    if (x.rows == ROWS) {
        few_rows<C, ROWS>(panel, x, groups, offset, sums);
    } else if constexpr (ROWS > 1) {
        up_to_few_rows<C, ROWS - 1>(panel, x, groups, offset, sums);
    }
}

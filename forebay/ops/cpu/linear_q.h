// What the linear kernels on quantized weights share: the packed weight, the quantized rows, the order of the sums.
//
// A weight [N, K] of groups of 32 inputs, each scale * (code - zero) + minimum, lies in panels of 32 outputs. A panel is a
// block per group, contiguous and in the order it is read:
//   codes     [2 halves of 16 outputs][8 quads of inputs][16 outputs][4 inputs], as VNNI and AMX want them:
//             8 bits: int8, code - zero
//             4 bits: the low halves of the first 4 quads are inputs 0-15 of the group, the high halves 16-31
//   scales    float16 [32]
//   minimums  float16 [32], where there are any
// A header of one cache line comes first; outputs beyond N are zero. The bias is float32 [ceil(N/32) * 32].
//
// Rows of x are quantized to int8 by groups of the same 32 inputs. The sum of a group's products is an integer and exact
// whichever instructions make it, so that a row's result depends on the float operations below alone, and these come in
// the same order for one row as for hundreds, on every CPU.
#pragma once

#include <algorithm>

#include "linear.h"
#include "simd.h"

constexpr long kGroup = 32;
constexpr long kHalf = 16;  // outputs that share a tile of codes
constexpr long kQuads = kGroup / 4;
constexpr long kHalfBytes = kHalf * kGroup;  // of codes of 8 bits
constexpr long kHeaderBytes = 64;

struct CodeHeader {
    int32_t bits;
    int32_t zero;
    int32_t minimums;
};

// The sizes and places within the block of a group.
template <int BITS, bool MINIMUMS>
struct Codes {
    static constexpr int kBits = BITS;
    static constexpr bool kMinimums = MINIMUMS;
    static constexpr long kHalfCodes = kHalfBytes * BITS / 8;
    static constexpr long kScalesAt = 2 * kHalfCodes;
    static constexpr long kMinimumsAt = kScalesAt + kPanel * 2;
    static constexpr long kBlock = kMinimumsAt + (MINIMUMS ? kPanel * 2 : 0);
};

// Calls body(Codes<...>{}) for the format that `header` names.
template <class Body>
void with_codes(const CodeHeader& header, const Body& body) {
    if (header.bits == 4) {
        header.minimums ? body(Codes<4, true>{}) : body(Codes<4, false>{});
    } else {
        header.minimums ? body(Codes<8, true>{}) : body(Codes<8, false>{});
    }
}

inline const CodeHeader& header_of(const uint8_t* packed) { return *reinterpret_cast<const CodeHeader*>(packed); }

// Rows that go through a kernel together, as `quantize` leaves them: for each group
// codes int8 [rows][32], scales float [rows], sums float [rows] (scale * sum of codes), code_sums int32 [rows].
struct RowTile {
    const char* data;
    long rows;

    static long group_bytes(long rows) { return rows * (kGroup + 3 * 4); }

    const char* group(long g) const { return data + g * group_bytes(rows); }
    const float* scales(long g) const { return reinterpret_cast<const float*>(group(g) + rows * kGroup); }
    const float* sums(long g) const { return scales(g) + rows; }
    const int32_t* code_sums(long g) const { return reinterpret_cast<const int32_t*>(sums(g) + rows); }
};

// The float operations of one group, on W outputs: dot is the exact sum of (code - zero) * x's code.
FOREBAY_INLINE Vec add_products(Vec sum, Vec dot, Vec scale, Vec x_scale) { return fma(scale * x_scale, dot, sum); }
FOREBAY_INLINE Vec add_minimums(Vec sum, Vec minimum, Vec x_sum) { return fma(minimum, x_sum, sum); }

#if defined(__AVX512F__)

inline Vec load_half(const uint8_t* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline Vec to_floats(__m512i x) { return {_mm512_cvtepi32_ps(x)}; }

#else

inline Vec load_half(const uint8_t* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
inline Vec to_floats(__m256i x) { return {_mm256_cvtepi32_ps(x)}; }

#endif

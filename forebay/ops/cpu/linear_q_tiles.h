// Many rows by one panel of a quantized weight, on AMX: one tile product for each group, taken out and summed up in floats.
#pragma once

#include "amx.h"
#include "linear_q.h"

// A panel that is opened once and used for all tiles of rows.
struct OpenPanel {
    const uint8_t* codes;  // int8: half h of group g at g * group_bytes + h * kHalfBytes
    long group_bytes;
    const float* scales;  // [groups][scales [32], minimums [32] where there are any]
};

template <class C>
long open_bytes(long groups) {
    return groups * ((C::kBits == 4 ? 2 * kHalfBytes : 0) + (C::kMinimums ? 2 : 1) * kPanel * 4);
}

template <class C>
OpenPanel open_panel(const uint8_t* panel, long groups, int32_t zero, void* scratch) {
    const __m512i low = _mm512_set1_epi8(15);
    const __m512i zeros = _mm512_set1_epi8(static_cast<char>(zero));
    auto* scales = static_cast<float*>(scratch);
    auto* codes = reinterpret_cast<uint8_t*>(scales + groups * (C::kMinimums ? 2 : 1) * kPanel);
    const OpenPanel open = C::kBits == 4 ? OpenPanel{codes, 2 * kHalfBytes, scales} : OpenPanel{panel, C::kBlock, scales};
    for (long g = 0; g < groups; ++g, panel += C::kBlock) {
        if constexpr (C::kBits == 4) {
            for (long h = 0; h < 2; ++h, codes += kHalfBytes) {
                for (long q = 0; q < 4; ++q) {
                    const __m512i both = _mm512_loadu_si512(panel + h * C::kHalfCodes + q * 64);
                    const __m512i first = _mm512_and_si512(both, low);
                    const __m512i second = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
                    _mm512_storeu_si512(codes + q * 64, _mm512_sub_epi8(first, zeros));
                    _mm512_storeu_si512(codes + (q + 4) * 64, _mm512_sub_epi8(second, zeros));
                }
            }
        }
        for (long i = 0; i < (C::kMinimums ? 2 : 1) * kPanel; i += W, scales += W) {
            store(scales, load_half(panel + C::kScalesAt + i * 2));
        }
    }
    return open;
}

// One half of a panel by ROWS rows; sums [ROWS][32] of which 16 columns are written.
template <class C, int ROWS>
void tile_by_half(const OpenPanel& w, long half, const RowTile& x, long groups, float* sums) {
    alignas(64) int32_t dots[2][ROWS * kHalf];
    Vec sum[ROWS];
    for (auto& s : sum) s = zero();
    const uint8_t* codes = w.codes + half * kHalfBytes;
    const float* scales = w.scales + half * kHalf;
    for (long g = 0; g < groups; ++g, codes += w.group_bytes, scales += (C::kMinimums ? 2 : 1) * kPanel) {
        int32_t* out = dots[g % 2];
        TILE_LOAD(4, x.group(g), kGroup);
        TILE_LOAD(6, codes, 64);
        TILE_ZERO(0);
        TILE_DP_INT8(0, 4, 6);
        TILE_STORE(0, out, 64);
        const Vec scale = load(scales);
        const Vec minimum = C::kMinimums ? load(scales + kPanel) : zero();
        const float* x_scales = x.scales(g);
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r) {
            const Vec dot = to_floats(_mm512_load_si512(out + r * kHalf));
            sum[r] = add_products(sum[r], dot, scale, set1(x_scales[r]));
            if constexpr (C::kMinimums) sum[r] = add_minimums(sum[r], minimum, set1(x_scales[ROWS + r]));
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) store(sums + r * kPanel + half * kHalf, sum[r]);
}

// x has an even number of rows up to ROWS; sums [x.rows][32], bias not added. The tiles are configured for x.rows.
template <class C, int ROWS = 16>
void tile_by_panel(const OpenPanel& w, const RowTile& x, long groups, float* sums) {
    if (x.rows == ROWS) {
        for (long half = 0; half < 2; ++half) tile_by_half<C, ROWS>(w, half, x, groups, sums);
    } else if constexpr (ROWS > 2) {
        tile_by_panel<C, ROWS - 2>(w, x, groups, sums);
    }
}

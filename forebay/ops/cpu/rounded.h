// Activations rounded to integers of 8 or 16 bits, by groups of 32 inputs of a row: what quantized weights are multiplied
// with as integers (linear_int.cpp).
//
// x is nearly scale * (256 * first plane + second plane), or scale * plane with 8 bits; scale is the group's largest |x|
// over the largest integer. A group with an entry that is not finite has a scale that is NaN.
#pragma once

#include "bf16.h"
#include "linear.h"
#include "simd.h"

constexpr int kMostRows = W == 16 ? 8 : 4;  // that are multiplied together: their sums stay in registers

template <int PLANES>
struct RoundedGroup {
    int8_t planes[PLANES][kGroup];
    float scale;
    // Of the integers of the first 16 inputs, the last 16 and all.
    float sums[3];  // times scale
    int32_t minus_sums[3];
};

// Rows are rounded in blocks of kMostRows and a last one of as many as are left, up to a power of two; in a block lie the
// groups [inputs / 32][rows of the block]. Rows that there are not stay as they were: nobody reads what comes of them.
inline long rows_of_block(long rows_left) {
    long rows = 1;
    while (rows < std::min<long>(kMostRows, rows_left)) rows *= 2;
    return rows;
}

inline long rounded_bytes(long bits, long rows, long inputs) {
    const long size = bits == 8 ? sizeof(RoundedGroup<1>) : sizeof(RoundedGroup<2>);
    return round_up(rows, kMostRows) * (inputs / kGroup) * size;
}

// x float32 or bfloat16 [rows, inputs], rows ldx apart, of which the first is the first of a block; `out` has rounded_bytes.
template <class T>
void round_rows(const T* x, long ldx, long rows, long inputs, long bits, void* out);

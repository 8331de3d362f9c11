// Vectors of 32-bit integers beside those of simd.h, and sums of products of bytes.
//
// Ints: W integers. Dots<BITS, ROWS>: for kRows of a block of ROWS rows, and every 32-bit lane, the sum of up to 8 products
// of four codes, unsigned numbers of BITS bits less kLowered, with four signed bytes of the row. `add` takes kFours products
// at once, of which FOUR is the first of 8; rows are ldx bytes apart. All sums are exact.
#pragma once

#if defined(__aarch64__)
#include "ints_neon.h"
#else
#include "ints_x86.h"
#endif

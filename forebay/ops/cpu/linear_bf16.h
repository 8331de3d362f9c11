// The layout of a bfloat16 weight within the tiles of linear.h.
#pragma once

#include "linear.h"

// A tile is [32 / kTogether][16 outputs][kTogether inputs]: of BFMMLA an operand is two outputs with four inputs each.
#if defined(FOREBAY_BFMMLA)
constexpr long kTogether = 4;
#else
constexpr long kTogether = 2;
#endif

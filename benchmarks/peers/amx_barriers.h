// For gcc 12, whose AMX intrinsics do not tell the compiler that they read memory: what was stored to a tile's source or
// to the tile configuration just before may then be stored afterwards or never, and llama.cpp's quantized products fault.
// Included first in ggml's amx/mmq.cpp by install.py.
#pragma once

#if defined(__GNUC__) && !defined(__clang__) && defined(__AMX_TILE__)
#include <immintrin.h>

#define FOREBAY_BARRIER() __asm__ volatile("" ::: "memory")

#undef _tile_loadd
#define _tile_loadd(dst, base, stride)             \
    do {                                           \
        FOREBAY_BARRIER();                         \
        _tile_loadd_internal(dst, base, stride);   \
    } while (0)

#undef _tile_stored
#define _tile_stored(src, base, stride)            \
    do {                                           \
        _tile_stored_internal(src, base, stride);  \
        FOREBAY_BARRIER();                         \
    } while (0)

// A function in gcc's header; the parentheses call it rather than this macro.
#define _tile_loadconfig(config)                   \
    do {                                           \
        FOREBAY_BARRIER();                         \
        (_tile_loadconfig)(config);                \
    } while (0)
#endif

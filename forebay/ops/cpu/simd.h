// One vector type, Vec, of W floats, so that each kernel is written once: AVX-512 (W = 16), AVX2 with FMA or NEON (W = 8).
// What else a variant has is said by macros (base/variants.py): FOREBAY_BF16 (conversion to and products of bfloat16),
// FOREBAY_AMX (tiles), and those for sums of products of bytes and for products of bfloat16 on ARM, which only files that
// use them name, since all others are compiled once for variants with and without.
//
// What takes a lambda or is called within loops is inlined by force: where the compiler does not, its vectors pass through
// memory, which cost the recurrences up to half of their speed.
//
// Kernels are compiled with -ffp-contract=off: a multiply-add is fused only where fma() says so. Sums over lanes use one
// fixed tree, so a result depends on the data alone.
#pragma once

#include <cstring>
#include <limits>
#include <utility>

#if defined(__aarch64__)
#include "simd_neon.h"
#else
#include "simd_x86.h"
#endif

#define FOREBAY_INLINE [[gnu::always_inline]] inline
#define FOREBAY_INLINE_LAMBDA __attribute__((always_inline))  // behind its parameters

inline Vec zero() { return set1(0.0f); }

#if !defined(__AVX512F__)

// The first n entries, less than W.
template <class T>
inline Vec load_n(const T* p, long n) {
    T lanes[W] = {};
    std::memcpy(lanes, p, n * sizeof(T));
    return load(lanes);
}
template <class T>
inline void store_n(T* p, Vec x, long n) {
    T lanes[W];
    store(lanes, x);
    std::memcpy(p, lanes, n * sizeof(T));
}

#endif

inline float hsum(Vec a) { return hsum4(a, a, a, a)[0]; }

// The first 1 to 4 entries at p.
template <class T>
inline Quad load4(const T* p, long n) {
    if (n == 4) return load_quad(p);
    T lanes[4] = {};
    std::memcpy(lanes, p, n * sizeof(T));
    return load_quad(lanes);
}
template <class T>
inline void store4(T* p, Quad x, long n) {
    if (n == 4) return store_quad(p, x);
    T lanes[4];
    store_quad(lanes, x);
    std::memcpy(p, lanes, n * sizeof(T));
}

// exp within 1 ulp or so for x <= 88.7, +inf above, 0 below -103.97 and for -inf; NaN stays NaN.
// x = n ln2 + r, |r| <= ln2 / 2, with ln2 in two parts (Cody and Waite); exp(r) by Taylor to degree 7.
FOREBAY_INLINE Vec exp(Vec x) {
    const Vec lowest = set1(-103.97f);
    // The operand order matters: min and max return their second operand when one is NaN.
    const Vec clamped = min(set1(88.8f), max(lowest, x));
    const Vec n = round(clamped * set1(1.44269504088896341f));
    Vec r = fma(n, set1(-0.693359375f), clamped);
    r = fma(n, set1(2.12194440e-4f), r);
    Vec p = set1(1.0f / 5040);
    p = fma(p, r, set1(1.0f / 720));
    p = fma(p, r, set1(1.0f / 120));
    p = fma(p, r, set1(1.0f / 24));
    p = fma(p, r, set1(1.0f / 6));
    p = fma(p, r, set1(0.5f));
    p = fma(p, r, set1(1.0f));
    p = fma(p, r, set1(1.0f));
    return zero_where_below(scale_by_power(p, n), x, lowest);
}

// Body(std::integral_constant<int, i>) for i in 0..N, so that vectors indexed by i stay in registers.
template <int N, class Body>
FOREBAY_INLINE void unrolled(Body&& body) {
    [&]<int... I>(std::integer_sequence<int, I...>)
        FOREBAY_INLINE_LAMBDA { (body(std::integral_constant<int, I>{}), ...); }(std::make_integer_sequence<int, N>{});
}

inline long round_up(long n, long to) { return (n + to - 1) / to * to; }

// Calls body(i, lanes) for 0..n in steps of W; only the last may have fewer lanes than W.
template <class Body>
FOREBAY_INLINE void for_each_vector(long n, Body&& body) {
    long i = 0;
    for (; i + W <= n; i += W) body(i, static_cast<long>(W));
    if (i < n) body(i, n - i);
}

template <class T>
FOREBAY_INLINE Vec load_part(const T* p, long n) {
    return n == W ? load(p) : load_n(p, n);
}
template <class T>
FOREBAY_INLINE void store_part(T* p, Vec x, long n) {
    if (n == W) {
        store(p, x);
    } else {
        store_n(p, x, n);
    }
}

// Stores x, and returns what was stored.
FOREBAY_INLINE Vec store_rounded(float* p, Vec x, long n) {
    store_part(p, x, n);
    return x;
}
FOREBAY_INLINE Vec store_rounded(bf16* p, Vec x, long n) {
    store_part(p, x, n);
    return widen(narrow(x));
}

// What the kernels share that work on each row by itself.
#pragma once

#include <algorithm>

#include "pool.h"
#include "simd.h"

constexpr long kPieceElements = 16384;  // under this a thread's wake-up costs more than its help

inline long grain_for(long row_elements) { return std::max(1L, kPieceElements / std::max(1L, row_elements)); }

template <class T>
float sum_of_squares(const T* x, long n) {
    // Two chains hide the latency of the additions.
    Vec even = zero(), odd = zero();
    long i = 0;
    for (; i + 2 * W <= n; i += 2 * W) {
        const Vec a = load(x + i), b = load(x + i + W);
        even = fma(a, a, even);
        odd = fma(b, b, odd);
    }
    for_each_vector(n - i, [&](long j, long part) {
        const Vec a = load_part(x + i + j, part);
        even = fma(a, a, even);
    });
    return hsum(even + odd);
}

// Whether no entry is a NaN or an infinity: times zero these are NaN, and so is every sum with one.
template <class T>
bool is_finite(const T* x, long n) {
    Vec poison = zero();
    for_each_vector(n, [&](long i, long part) { poison = fma(load_part(x + i, part), zero(), poison); });
    const float sum = hsum(poison);
    return sum == sum;
}

// out [rows, n] = f(first, second), entry by entry; rows are ldf, lds and ldo apart. out may be one of the two.
template <class T, class F>
void zip_rows(Pool& pool, const T* first, long ldf, const T* second, long lds, T* out, long ldo, long rows, long n,
              const F& f) {
    pool.run(rows, grain_for(2 * n), [=](long begin, long end) {
        for (long r = begin; r < end; ++r) {
            for_each_vector(n, [&](long i, long part) {
                const Vec a = load_part(first + r * ldf + i, part), b = load_part(second + r * lds + i, part);
                store_part(out + r * ldo + i, f(a, b), part);
            });
        }
    });
}

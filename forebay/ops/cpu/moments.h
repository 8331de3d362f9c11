// Mean and variance of a row.
#pragma once

#include "rows.h"

struct Moments {
    float mean;
    float variance;  // about the mean, of all n entries
};

template <class T>
Moments moments_of(const T* x, long n) {
    Vec sum = zero(), squares = zero();
    for_each_vector(n, [&](long i, long part) { sum = sum + load_part(x + i, part); });
    const float mean = hsum(sum) / static_cast<float>(n);
    for_each_vector(n, [&](long i, long part) {
        float away[W] = {};  // nothing beyond the row's end
        store_part(away, load_part(x + i, part) - set1(mean), part);
        squares = fma(load(away), load(away), squares);
    });
    return {mean, hsum(squares) / static_cast<float>(n)};
}

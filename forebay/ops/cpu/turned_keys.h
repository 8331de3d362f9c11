// A block of keys turned round, so that a score is a sum over dimensions in one lane, and scores of rows against it.
#pragma once

#include <type_traits>

#include "attention.h"
#include "transpose.h"

constexpr int kTile = W == 16 ? 6 : 3;  // rows: with kVectors each they fill the registers
constexpr int kVectors = 4;

// Whether scores are sums of products of pairs: queries and keys in bfloat16 on a CPU that multiplies these. Turned keys,
// and a row of queries, then have two dimensions in each 32 bits.
#if defined(FOREBAY_BF16)
template <class T, class E>
constexpr bool kInPairs = std::is_same_v<T, bf16> && std::is_same_v<E, bf16>;
#else
template <class T, class E>
constexpr bool kInPairs = false;
#endif

template <bool kPairs>
FOREBAY_INLINE Vec add_products(Vec x, Vec k, Vec sum) {
#if defined(FOREBAY_BF16)
    if constexpr (kPairs) {
        return {_mm512_dpbf16_ps(sum.v, reinterpret_cast<__m512bh>(x.v), reinterpret_cast<__m512bh>(k.v))};
    }
#endif
    return fma(x, k, sum);
}

// put(i, the i-th entries) for 32 bits of W keys each: 1, 2 or 4 entries, the first in the lowest bits.
template <class Put>
FOREBAY_INLINE void open_entries(const float*, Word x, const Put& put) {
    put(0, as_floats(x));
}
template <class Put>
FOREBAY_INLINE void open_entries(const bf16*, Word x, const Put& put) {
    put(0, first_of_pairs(x));
    put(1, second_of_pairs(x));
}
template <class Put>
FOREBAY_INLINE void open_entries(const int8_t*, Word x, const Put& put) {
    for (int i = 0; i < 4; ++i) put(i, signed_byte(x, i));
}

// W keys of a block, from `lane` on, into `keys` [head_dim rounded up to 16][kBlock], in pairs half as many. Lanes outside
// of `lanes`, which has some of these, get some other key.
template <bool kPairs = false, class E>
void turn_keys(const Cache<E>& cache, const long* slots, Lanes lanes, long lane, long kv_head, long head_dim,
               float* keys) {
    constexpr long kEntries = 16 / sizeof(E);
    const E* heads[W];
    for (long i = 0; i < W; ++i) {
        const long seen = std::clamp(lane + i, lanes.begin, lanes.end - 1);
        heads[i] = cache.head(slots[seen], kv_head);
    }
    E spare[W][kEntries] = {};
    for (long dim = 0; dim < head_dim; dim += kEntries) {
        const long rest = head_dim - dim;
        if (rest < kEntries) {
            for (long i = 0; i < W; ++i) std::copy_n(heads[i] + dim, rest, spare[i]);
        }
        const auto at = [&](int i) { return rest < kEntries ? spare[i] : heads[i] + dim; };
        transpose_quads(at, [&](int quad, Word entries) FOREBAY_INLINE_LAMBDA {
            if constexpr (kPairs) return store(keys + (dim / 2 + quad) * kBlock + lane, as_floats(entries));
            float* to = keys + (dim + quad * kEntries / 4) * kBlock + lane;
            open_entries(heads[0], entries, [&](int i, Vec x) FOREBAY_INLINE_LAMBDA { store(to + i * kBlock, x); });
        });
    }
}

// Scores [kCount][kBlock] of rows q, `width` apart, against turned keys.
template <int kCount, bool kPairs = false>
void score_rows(const float* q, long width, const float* keys, long head_dim, float* scores) {
    for (long first = 0; first < kBlock; first += kVectors * W) {
        Vec sums[kCount][kVectors];
        for (auto& row : sums) std::fill_n(row, kVectors, zero());
        for (long dim = 0; dim < (kPairs ? (head_dim + 1) / 2 : head_dim); ++dim) {
            Vec k[kVectors];
            for (int j = 0; j < kVectors; ++j) k[j] = load(keys + dim * kBlock + first + j * W);
            for (int r = 0; r < kCount; ++r) {
                const Vec x = set1(q[r * width + dim]);
                for (int j = 0; j < kVectors; ++j) sums[r][j] = add_products<kPairs>(x, k[j], sums[r][j]);
            }
        }
        for (int r = 0; r < kCount; ++r) {
            for (int j = 0; j < kVectors; ++j) store(scores + r * kBlock + first + j * W, sums[r][j]);
        }
    }
}

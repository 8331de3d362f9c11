// A query row's running softmax (Milakov and Gimelshein, arXiv 1805.02867), in powers of two.
#pragma once

#include <limits>

#include "activations.h"
#include "attention.h"

// 2^x to about 1e-7 of it, 0 below -126, NaN of NaN. x = n + r, |r| <= 1/2; 2^r by Taylor to degree 6. No result is
// less than a normal number: the processor takes some hundred cycles to make one that is.
FOREBAY_INLINE Vec power_of_two(Vec x) {
    const Vec lowest = set1(-126.0f);
    const Vec clamped = max(lowest, x);  // max returns its second operand when one is NaN
    const Vec n = round(clamped);
    const Vec r = clamped - n;
    Vec p = set1(1.5403530e-4f);
    p = fma(p, r, set1(1.3333558e-3f));
    p = fma(p, r, set1(9.6181291e-3f));
    p = fma(p, r, set1(5.5504109e-2f));
    p = fma(p, r, set1(2.4022651e-1f));
    p = fma(p, r, set1(6.9314718e-1f));
    p = fma(p, r, set1(1.0f));
    return zero_where_below(scale_by_power(p, n), x, lowest);
}

constexpr float kLog2e = 1.44269504088896341f;

// The sums of some query rows over the keys seen so far: weights are 2^(score - top) in units of log2. A row's sums lie
// together, as they do in the partials: v_width values (those beyond v_dim are padding), the weights' sum in W lanes,
// the top.
struct RowSums {
    long v_width;
    long row_floats;
    float* memory;

    RowSums(float* at, long v_dim) : v_width(round_up(v_dim, 32)), row_floats(v_width + 2 * kWeightLanes), memory(at) {}

    float* values(long row) const { return memory + row * row_floats; }
    float* weights(long row) const { return values(row) + v_width; }
    float& top(long row) const { return weights(row)[kWeightLanes]; }

    void clear(long row) const {
        std::fill_n(values(row), row_floats, 0.0f);
        top(row) = -std::numeric_limits<float>::infinity();
    }

    void set_top(long row, float to) const {
        const Vec shrink = power_of_two(set1(top(row) - to));
        float* at = values(row);
        for (long i = 0; i < v_width + W; i += W) store(at + i, load(at + i) * shrink);
        top(row) = to;
    }

    // Adds another row's sums. One that saw nothing changes nothing.
    void add(long row, const float* other) const {
        const float its_top = other[v_width + kWeightLanes];
        if (its_top == -std::numeric_limits<float>::infinity()) return;
        if (top(row) == -std::numeric_limits<float>::infinity()) {
            std::copy_n(other, row_floats, values(row));
            return;
        }
        if (its_top > top(row)) set_top(row, its_top);
        const Vec shrink = power_of_two(set1(its_top - top(row)));
        float* at = values(row);
        for (long i = 0; i < v_width + W; i += W) store(at + i, fma(load(other + i), shrink, load(at + i)));
    }

    // What the values are multiplied with in the end. A sink is a key that every query of the head sees, and whose
    // value is nothing.
    Vec inverse(long row, const float* sink) const {
        if (sink == nullptr) return set1(1.0f / hsum(load(weights(row))));
        const float logit = *sink * kLog2e;
        if (logit > top(row)) set_top(row, logit);
        return set1(1.0f) / (set1(hsum(load(weights(row)))) + power_of_two(set1(logit - top(row))));
    }
};

// How far a block's scores may exceed the top before the sums are made smaller: weights are then up to 2^8, which costs
// no precision, and most blocks leave the sums alone.
constexpr float kHeadroom = 8.0f;

// scores [kBlock] become softcap(score * scale). Not inlined: without a cap `weigh` keeps its registers.
__attribute__((noinline)) inline void cap_scores(float* scores, ScoreMap map) {
    for (int i = 0; i < kBlock; i += W) store(scores + i, softcap(load(scores + i) * set1(map.scale), map.cap));
}

// Turns products q k [kBlock] of one row into weights in place: 2^(log2(e) score - top) in the lanes that it sees, 0
// elsewhere. `factors` [kBlock] of the keys, or null. A row that sees nothing keeps its sums.
FOREBAY_INLINE void weigh(float* scores, Lanes lanes, ScoreMap map, const float* factors, const RowSums& sums,
                          long row) {
    constexpr float kInf = std::numeric_limits<float>::infinity();
    constexpr int kVectors = kBlock / W;
    float scale = map.scale * kLog2e;
    if (lanes.begin >= lanes.end) {
        for (int i = 0; i < kVectors; ++i) store(scores + i * W, zero());
        return;
    }
    if (factors != nullptr) {
        for (int i = 0; i < kVectors; ++i) store(scores + i * W, load(scores + i * W) * load(factors + i * W));
    }
    if (map.cap > 0) {
        cap_scores(scores, map);
        scale = kLog2e;
    }
    for (long i = 0; i < lanes.begin; ++i) scores[i] = -kInf;
    for (long i = lanes.end; i < kBlock; ++i) scores[i] = -kInf;
    Vec x[kVectors];
    for (int i = 0; i < kVectors; ++i) x[i] = load(scores + i * W);
    Vec top = x[0];
    for (int i = 1; i < kVectors; ++i) top = max(x[i], top);
    const float block_top = hmax(top) * scale;
    if (block_top > sums.top(row) + kHeadroom) sums.set_top(row, block_top);
    Vec sum = load(sums.weights(row));
    for (int i = 0; i < kVectors; ++i) {
        const Vec p = power_of_two(fma(x[i], set1(scale), set1(-sums.top(row))));
        store(scores + i * W, p);
        sum = sum + p;
    }
    store(sums.weights(row), sum);
}

// Calls visit(row, query, q_head) for a walk's query rows: for each of its heads, which are `head_rows` apart, the
// queries with the heads of their group, query-major.
template <class Visit>
void for_each_row(const AttentionShape& shape, const Walk& walk, long head_rows, const Visit& visit) {
    const long group = shape.group();
    for (long h = 0; h < walk.num_heads; ++h) {
        for (long r = 0; r < walk.num_queries * group; ++r) {
            visit(h * head_rows + r, walk.queries[r / group], (walk.first_head + h) * group + r % group);
        }
    }
}

// Adds up a walk's segments in `total`, if it finishes, each by add_block(block) for its blocks, which adds to `sums`.
template <class AddBlock>
void add_segments(const AttentionShape& shape, const Walk& walk, const Partials& partials, long head_rows,
                  const RowSums& sums, const RowSums& total, const AddBlock& add_block) {
    const auto each_row = [&](const auto& visit) { for_each_row(shape, walk, head_rows, visit); };
    each_row([&](long row, const Query& query, long q_head) {
        total.clear(row);
        for (long s = walk.first_done; s < walk.end_done; ++s) total.add(row, partials.at(query.token, q_head, s));
    });
    for (long begin = walk.begin; begin < walk.end;) {
        const long segment = begin / kSegmentBlocks, end = std::min(walk.end, (segment + 1) * kSegmentBlocks);
        const bool resumes = walk.resumes && begin == walk.begin;
        each_row([&](long row, const Query& query, long q_head) {
            sums.clear(row);
            if (resumes) sums.add(row, partials.at(query.token, q_head, segment));
        });
        for (long block = begin; block < end; ++block) add_block(block);
        each_row([&](long row, const Query& query, long q_head) {
            if (walk.finishes) {
                total.add(row, sums.values(row));
            } else {
                std::copy_n(sums.values(row), sums.row_floats, partials.at(query.token, q_head, segment));
            }
        });
        begin = end;
    }
}

// Writes the results of a walk that finishes.
template <class T, class E>
void finish_rows(const AttentionCall<T, E>& call, const Walk& walk, long head_rows, const RowSums& total) {
    const AttentionShape& shape = call.shape;
    for_each_row(shape, walk, head_rows, [&](long row, const Query& query, long q_head) {
        T* out = call.out + (query.token * shape.q_heads + q_head) * shape.v_dim;
        const Vec inverse = total.inverse(row, call.sinks == nullptr ? nullptr : call.sinks + q_head);
        const float* values = total.values(row);
        for_each_vector(shape.v_dim, [&](long i, long part) { store_part(out + i, load(values + i) * inverse, part); });
    });
}

// Paged attention in float32 arithmetic.
#include "attention_rows.h"

namespace {

// A walk's working memory, from the thread's scratch. Head vectors are padded with zeros to `width` and to
// `sums.v_width`.
struct Work {
    long width;
    float* q;        // [rows][width]
    float* k;        // [kBlock][width]
    float* v;        // [kBlock][v_width]
    float* scores;   // [kBlock]
    float* factors;  // [2][kBlock], of keys and values
    RowSums sums;
    RowSums total;

    Work(long head_dim, long v_dim, long rows) : width(round_up(head_dim, W)), sums(nullptr, v_dim), total(sums) {
        const long floats = (rows + kBlock) * width + kBlock * (sums.v_width + 3) + 2 * rows * sums.row_floats;
        q = static_cast<float*>(thread_scratch(floats * sizeof(float)));
        k = q + rows * width;
        v = k + kBlock * width;
        scores = v + kBlock * sums.v_width;
        factors = scores + kBlock;
        sums.memory = factors + 2 * kBlock;
        total.memory = sums.memory + rows * sums.row_floats;
    }
};

template <class E>
void copy_head(const E* from, long head_dim, float* to) {
    for_each_vector(head_dim, [&](long i, long part) { store(to + i, load_part(from + i, part)); });
}

void score_keys(const float* q, const float* k, long width, Lanes lanes, float* scores) {
    // Four at a time from a multiple of four, so that a key's score does not depend on where the visible lanes begin.
    for (long key = lanes.begin / 4 * 4; key < lanes.end; key += 4) {
        Vec a = zero(), b = zero(), c = zero(), d = zero();
        for (long i = 0; i < width; i += W) {
            const Vec x = load(q + i);
            const float* row = k + key * width + i;
            a = fma(x, load(row), a);
            b = fma(x, load(row + width), b);
            c = fma(x, load(row + 2 * width), c);
            d = fma(x, load(row + 3 * width), d);
        }
        _mm_storeu_ps(scores + key, hsum4(a, b, c, d));
    }
}

void add_values(const float* weights, const float* v, long v_width, Lanes lanes, float* sums) {
    constexpr int kVectors = 32 / W;
    for (long i = 0; i < v_width; i += 32) {
        Vec s[kVectors];
        for (int j = 0; j < kVectors; ++j) s[j] = load(sums + i + j * W);
        for (long key = lanes.begin; key < lanes.end; ++key) {
            const Vec p = set1(weights[key]);
            for (int j = 0; j < kVectors; ++j) s[j] = fma(p, load(v + key * v_width + i + j * W), s[j]);
        }
        for (int j = 0; j < kVectors; ++j) store(sums + i + j * W, s[j]);
    }
}

// One head of a block for the rows that see any of it; `first_row` is the head's first.
template <class T, class E>
void add_head(const AttentionCall<T, E>& call, const Walk& walk, const Block& block, long first, long kv_head,
              long first_row, const Work& work) {
    const AttentionShape& shape = call.shape;
    const long v_width = work.sums.v_width;
    const bool scaled = call.k_cache.factors != nullptr;
    for (long lane = block.lanes.begin; lane < block.lanes.end; ++lane) {
        const long slot = block.slots[lane];
        copy_head(call.k_cache.head(slot, kv_head), shape.head_dim, work.k + lane * work.width);
        copy_head(call.v_cache.head(slot, kv_head), shape.v_dim, work.v + lane * v_width);
        if (scaled) {
            work.factors[lane] = call.k_cache.factor(slot, kv_head);
            work.factors[kBlock + lane] = call.v_cache.factor(slot, kv_head);
        }
    }
    const long group = shape.group();
    for (long r = 0; r < walk.num_queries * group; ++r) {
        const Lanes lanes = visible(walk.queries[r / group].position, first, shape.window);
        if (lanes.begin >= lanes.end) continue;
        const long row = first_row + r;
        score_keys(work.q + row * work.width, work.k, work.width, lanes, work.scores);
        weigh(work.scores, lanes, call.scale * kLog2e, scaled ? work.factors : nullptr, work.sums, row);
        if (scaled) {
            for (long i = lanes.begin; i < lanes.end; ++i) work.scores[i] *= work.factors[kBlock + i];
        }
        add_values(work.scores, work.v, v_width, lanes, work.sums.values(row));
    }
}

template <class T, class E>
void attend(const AttentionCall<T, E>& call, const Walk& walk, const Walk&, const Partials& partials) {
    const AttentionShape& shape = call.shape;
    const long head_rows = walk.num_queries * shape.group();
    const Work work(shape.head_dim, shape.v_dim, walk.num_heads * head_rows);
    std::fill(work.q, work.sums.memory, 0.0f);
    for_each_row(shape, walk, head_rows, [&](long row, const Query& query, long q_head) {
        copy_head(call.q + query.token * call.ldq + q_head * shape.head_dim, shape.head_dim, work.q + row * work.width);
    });
    add_segments(shape, walk, partials, head_rows, work.sums, work.total, [&](long at) {
        const long first = at * kBlock;
        const Block block(shape, walk, first);
        for (long h = 0; h < walk.num_heads; ++h) {
            add_head(call, walk, block, first, walk.first_head + h, h * head_rows, work);
        }
    });
    if (walk.finishes) finish_rows(call, walk, head_rows, work.total);
}

}  // namespace

FOREBAY_ATTENTION(float, float, f32_f32, attend)
FOREBAY_ATTENTION(float, int8_t, f32_i8, attend)
#if !defined(FOREBAY_AMX)  // attention_amx.cpp has these
FOREBAY_ATTENTION(bf16, bf16, bf16_bf16, attend)
FOREBAY_ATTENTION(bf16, int8_t, bf16_i8, attend)
#endif

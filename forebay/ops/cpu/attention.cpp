// Paged attention in float32 arithmetic.
#include "attention.h"

namespace {

// One piece's working memory, from the thread's scratch. Head vectors are padded with zeros to `width` and `v_width`.
struct Work {
    long width;
    long v_width;
    float* q;       // [rows][width]
    float* sums;    // [rows][v_width]
    float* k;       // [kBlock][width]
    float* v;       // [kBlock][v_width]
    float* scores;  // [kBlock]
    RowState* states;  // [rows]

    Work(long head_dim, long v_dim, long rows) : width(round_up(head_dim, W)), v_width(round_up(v_dim, W)) {
        const long floats = (rows + kBlock) * (width + v_width) + kBlock;
        q = static_cast<float*>(thread_scratch(floats * sizeof(float) + rows * sizeof(RowState)));
        sums = q + rows * width;
        k = sums + rows * v_width;
        v = k + kBlock * width;
        scores = v + kBlock * v_width;
        states = reinterpret_cast<RowState*>(scores + kBlock);
    }
};

template <class T>
void copy_head(const T* from, long head_dim, float* to) {
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

void add_values(const float* weights, const float* v, long width, Lanes lanes, float shrink, float* sums) {
    constexpr long kWide = 4 * W;
    long i = 0;
    for (; i + kWide <= width; i += kWide) {
        Vec s[4];
        for (int j = 0; j < 4; ++j) s[j] = load(sums + i + j * W) * set1(shrink);
        for (long key = lanes.begin; key < lanes.end; ++key) {
            const Vec p = set1(weights[key]);
            for (int j = 0; j < 4; ++j) s[j] = fma(p, load(v + key * width + i + j * W), s[j]);
        }
        for (int j = 0; j < 4; ++j) store(sums + i + j * W, s[j]);
    }
    for (; i < width; i += W) {
        Vec s = load(sums + i) * set1(shrink);
        for (long key = lanes.begin; key < lanes.end; ++key) {
            s = fma(set1(weights[key]), load(v + key * width + i), s);
        }
        store(sums + i, s);
    }
}

template <class T>
void attend_head(const AttentionCall<T>& call, const Piece& piece, long kv_head) {
    const long group = group_size(call), d = call.head_dim, rows = piece.num_tokens * group;
    const Work work(d, call.v_dim, rows);
    for (long r = 0; r < rows; ++r) {
        copy_head(call.q + (piece.first_token + r / group) * call.ldq + (kv_head * group + r % group) * d, d,
                  work.q + r * work.width);
        work.states[r] = first_state(call, kv_head * group + r % group);
    }
    std::fill_n(work.sums, rows * work.v_width, 0.0f);

    const long end = piece.first_position + piece.num_tokens;
    for (long first = first_block(call, piece); first < end; first += kBlock) {
        for_each_key(call, piece.seq, first, {0, std::min(kBlock, end - first)}, [&](long lane, long slot) {
            copy_head(call.k_cache.head(slot, kv_head), d, work.k + lane * work.width);
            copy_head(call.v_cache.head(slot, kv_head), call.v_dim, work.v + lane * work.v_width);
        });
        for (long r = 0; r < rows; ++r) {
            const Lanes lanes = visible(piece.first_position + r / group, first, call.window);
            if (lanes.begin >= lanes.end) continue;
            score_keys(work.q + r * work.width, work.k, work.width, lanes, work.scores);
            const float shrink = softmax_block(work.scores, lanes, call.scale, work.states[r]);
            add_values(work.scores, work.v, work.v_width, lanes, shrink, work.sums + r * work.v_width);
        }
    }
    for (long r = 0; r < rows; ++r) {
        T* out = call.out + ((piece.first_token + r / group) * call.q_heads + kv_head * group + r % group) * call.v_dim;
        const Vec inverse = set1(1.0f / work.states[r].sum);
        for_each_vector(call.v_dim, [&](long i, long part) {
            store_part(out + i, load(work.sums + r * work.v_width + i) * inverse, part);
        });
    }
}

template <class T>
void attend(const AttentionCall<T>& call, const Item& item, const Item&) {
    for (long h = 0; h < item.num_heads; ++h) attend_head(call, *item.piece, item.first_head + h);
}

}  // namespace

FOREBAY_ATTENTION(float, f32, attend<float>)
#if !defined(FOREBAY_AMX)  // attention_amx.cpp has this one
FOREBAY_ATTENTION(bf16, bf16, attend<bf16>)
#endif

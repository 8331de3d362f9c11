// The gated delta rule, a token at a time.
//
// A head's state is [key channels, value channels], and its columns do not touch each other: a part is four vectors of
// them. Each token walks its rows once: it writes, reads its output, and recalls what the next token needs to know.
#include <cmath>
#include <utility>

#include "activations.h"
#include "recurrence.h"
#include "rows.h"

namespace {

template <class T, class S>
struct Delta {
    const T* q;  // token t's heads at t * ldq
    long ldq;
    const T* k;
    long ldk;
    const T* v;
    long ldv;
    const float* log_decay;  // token t's heads at t * ldd
    long ldd;
    long decays;  // of a head: 1, or one for each key channel
    const float* beta;
    long ldbeta;
    S* state;
    StateBatch batch;
    T* out;
    long key_heads;
    long value_heads;
    long key_size;
    long value_size;
    float scale;
};

// What one token brings to all columns of a head: [key_size] each, padded to whole vectors.
struct DeltaToken {
    float* q;
    float* k;
    float* decay;
    float* kept;  // k * decay
};

template <class T>
Vec length_factor(const T* x, long n, float scale) {
    return set1(scale / std::sqrt(sum_of_squares(x, n) + 1e-6f));
}

template <class T, class S>
void prepare(const Delta<T, S>& call, long head, long t, const DeltaToken& token) {
    const long n = call.key_size, key_head = head / (call.value_heads / call.key_heads);
    const T *q = call.q + t * call.ldq + key_head * n, *k = call.k + t * call.ldk + key_head * n;
    widen_row(q, n, length_factor(q, n, call.scale), token.q);
    widen_row(k, n, length_factor(k, n, 1.0f), token.k);
    const float* log_decay = call.log_decay + t * call.ldd + head * call.decays;
    const Vec same = exp(set1(*log_decay));
    for_each_vector(n, [&](long i, long part) {
        const Vec decay = call.decays == 1 ? same : exp(load_part(log_decay + i, part));
        store(token.decay + i, decay);
        store(token.kept + i, load(token.k + i) * decay);
    });
}

// Some vectors of a state's columns: kCount whole ones, or one of `lanes` lanes.
template <int kCount, class S>
struct Columns {
    S* state;
    long stride;
    long key_size;
    long lanes;

    long part() const { return kCount > 1 ? W : lanes; }

    // recalled = token.kept @ state: what the state, once decayed, holds under the token's key.
    FOREBAY_INLINE void recall(DeltaToken token, Vec* recalled) const {
        for (int j = 0; j < kCount; ++j) recalled[j] = zero();
        for (long key = 0; key < key_size; ++key) {
            const Vec kept = set1(token.kept[key]);
            const S* row = state + key * stride;
            for (int j = 0; j < kCount; ++j) recalled[j] = fma(kept, load_part(row + j * W, part()), recalled[j]);
        }
    }

    // state = state * decay + k outer written, out = q @ state; and in the same walk what the next token recalls.
    FOREBAY_INLINE void write(DeltaToken token, const Vec* written, DeltaToken next, Vec* out, Vec* recalled) const {
        for (int j = 0; j < kCount; ++j) out[j] = recalled[j] = zero();
        for (long key = 0; key < key_size; ++key) {
            const Vec decay = set1(token.decay[key]), k = set1(token.k[key]), q = set1(token.q[key]);
            const Vec kept = set1(next.kept[key]);
            S* row = state + key * stride;
            for (int j = 0; j < kCount; ++j) {
                const Vec after = fma(k, written[j], load_part(row + j * W, part()) * decay);
                out[j] = fma(q, after, out[j]);
                recalled[j] = fma(kept, store_rounded(row + j * W, after, part()), recalled[j]);
            }
        }
    }
};

// Tokens begin..end in the columns that begin at `first` of the head.
template <int kCount, class T, class S>
void advance_columns(const Delta<T, S>& call, long head, long first, Columns<kCount, S> columns, long begin, long end,
                     DeltaToken token, DeltaToken next) {
    Vec recalled[kCount], written[kCount], out[kCount];
    prepare(call, head, begin, token);
    columns.recall(token, recalled);
    for (long t = begin; t < end; ++t, std::swap(token, next)) {
        if (t + 1 < end) {
            prepare(call, head, t + 1, next);
        } else {
            next = token;  // nobody asks what it recalls
        }
        const Vec beta = set1(call.beta[t * call.ldbeta + head]);
        const T* v = call.v + t * call.ldv + head * call.value_size + first;
        for (int j = 0; j < kCount; ++j) written[j] = beta * (load_part(v + j * W, columns.part()) - recalled[j]);
        columns.write(token, written, next, out, recalled);
        T* to = call.out + (t * call.value_heads + head) * call.value_size + first;
        for (int j = 0; j < kCount; ++j) store_part(to + j * W, out[j], columns.part());
    }
}

template <class T, class S>
void delta_part(const Delta<T, S>& call, long seq, long head, long first, long count) {
    const long keys = call.key_size, n = round_up(keys, W), entry = head * keys * call.value_size + first;
    float* memory = static_cast<float*>(thread_scratch(8 * n * sizeof(float) + keys * count * sizeof(S)));
    DeltaToken token{memory, memory + n, memory + 2 * n, memory + 3 * n};
    DeltaToken next{memory + 4 * n, memory + 5 * n, memory + 6 * n, memory + 7 * n};
    const StateBlock<S> block(call.state, call.value_heads * keys * call.value_size,
                              {entry, keys, count, call.value_size}, call.batch, seq,
                              reinterpret_cast<S*>(memory + 8 * n));
    run_block(call.batch, seq, block, [&](long begin, long end) {
        if (begin == end) return;
        for_each_columns(count, [&]<int kCount>(Count<kCount>, long column, long lanes) {
            const Columns<kCount, S> columns{block.at() + column, block.stride(), keys, lanes};
            advance_columns(call, head, first + column, columns, begin, end, token, next);
        });
    });
}

template <class T, class S>
void gated_delta_rule(Pool& pool, const Delta<T, S>& call) {
    const long parts_of_head = (call.value_size + kColumns - 1) / kColumns;
    for_each_part(pool, call.batch, call.value_heads * parts_of_head, [&](long seq, long part) {
        const long first = part % parts_of_head * kColumns;
        delta_part(call, seq, part / parts_of_head, first, std::min(kColumns, call.value_size - first));
    });
}

// log_decay [rows, n] = scale * softplus(decay + bias), or with a rate scale * sigmoid(rate * (decay + bias)).
template <class T>
void log_decay_row(const T* decay, const float* scale, const float* bias, const float* rate, float* log_decay, long n) {
    for_each_vector(n, [&](long i, long part) {
        const Vec shifted = load_part(decay + i, part) + load_part(bias + i, part);
        const Vec bounded = rate == nullptr ? softplus(shifted) : sigmoid(load_part(rate + i, part) * shifted);
        store_part(log_decay + i, load_part(scale + i, part) * bounded, part);
    });
}

template <class T>
void beta_row(const T* x, float most, float* beta, long heads) {
    for_each_vector(
        heads, [&](long i, long part) { store_part(beta + i, set1(most) * sigmoid(load_part(x + i, part)), part); });
}

}  // namespace

// decay [rows, n] and x [rows, heads], whose rows are ldd and ldx apart -> log_decay [rows, n], beta [rows, heads] =
// most * sigmoid(x). scale, bias and rate (or null) [n].
#define FOREBAY_DELTA_GATES(T, suffix)                                                                            \
    extern "C" void fb_delta_gates_##suffix(Pool* pool, const T* decay, long ldd, const T* x, long ldx,           \
                                            const float* scale, const float* bias, const float* rate, float most, \
                                            float* log_decay, float* beta, long rows, long n, long heads) {       \
        pool->op([=](Pool& p) {                                                                                   \
            p.run(rows, grain_for(4 * (n + heads)), [=](long begin, long end) {                                   \
                for (long r = begin; r < end; ++r) {                                                              \
                    log_decay_row(decay + r * ldd, scale, bias, rate, log_decay + r * n, n);                      \
                    beta_row(x + r * ldx, most, beta + r * heads, heads);                                         \
                }                                                                                                 \
            });                                                                                                   \
        });                                                                                                       \
    }

FOREBAY_DELTA_GATES(float, f32)
FOREBAY_DELTA_GATES(bf16, bf16)

// Tokens are ldq, ldk, ldv, ldd and ldbeta apart; state [slots, value_heads, key_size, value_size],
// out [tokens, value_heads, value_size].
#define FOREBAY_DELTA(T, S, suffix)                                                                             \
    extern "C" void fb_gated_delta_rule_##suffix(                                                               \
        Pool* pool, const T* q, long ldq, const T* k, long ldk, const T* v, long ldv, const float* log_decay,   \
        long ldd, long decays, const float* beta, long ldbeta, S* state, FOREBAY_BATCH, T* out, long key_heads, \
        long value_heads, long key_size, long value_size, float scale) {                                        \
        pool->op([=](Pool& p) {                                                                                 \
            gated_delta_rule(p, Delta<T, S>{q,                                                                  \
                                            ldq,                                                                \
                                            k,                                                                  \
                                            ldk,                                                                \
                                            v,                                                                  \
                                            ldv,                                                                \
                                            log_decay,                                                          \
                                            ldd,                                                                \
                                            decays,                                                             \
                                            beta,                                                               \
                                            ldbeta,                                                             \
                                            state,                                                              \
                                            FOREBAY_BATCH_OF_ARGUMENTS,                                         \
                                            out,                                                                \
                                            key_heads,                                                          \
                                            value_heads,                                                        \
                                            key_size,                                                           \
                                            value_size,                                                         \
                                            scale});                                                            \
        });                                                                                                     \
    }

FOREBAY_DELTA(float, float, f32_f32)
FOREBAY_DELTA(float, bf16, f32_bf16)
FOREBAY_DELTA(bf16, float, bf16_f32)
FOREBAY_DELTA(bf16, bf16, bf16_bf16)

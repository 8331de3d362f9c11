// The gated delta rule, a token at a time.
//
// A head's state is [key channels, value channels], and its columns do not touch each other: a part is four vectors of
// them, and each token walks its rows twice, to recall and to write. Shape letters as in recurrence.py.
#include <cmath>

#include "activations.h"
#include "recurrence.h"
#include "rows.h"

namespace {

constexpr long kColumns = 4 * W;  // of a part: a state of 128 rows is then 32 KiB with AVX-512, 16 KiB with AVX2

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
    bool l2_norm;
};

// One item's working memory, from the thread's scratch. Those of key channels are padded to whole vectors.
template <class S>
struct Work {
    float* q;
    float* k;
    float* decay;
    float* kept;  // k * decay
    S* spare;     // [key_size][kColumns]

    explicit Work(long key_size) {
        const long n = round_up(key_size, W);
        q = static_cast<float*>(thread_scratch(4 * n * sizeof(float) + key_size * kColumns * sizeof(S)));
        k = q + n;
        decay = k + n;
        kept = decay + n;
        spare = reinterpret_cast<S*>(kept + n);
    }
};

template <class T>
Vec length_factor(const T* x, long n, float scale, bool l2_norm) {
    return set1(l2_norm ? scale / std::sqrt(sum_of_squares(x, n) + 1e-6f) : scale);
}

// What all columns of a head need of token t.
template <class T, class S>
void prepare(const Delta<T, S>& call, long t, long head, const Work<S>& work) {
    const long n = call.key_size, key_head = head / (call.value_heads / call.key_heads);
    const T *q = call.q + t * call.ldq + key_head * n, *k = call.k + t * call.ldk + key_head * n;
    widen_row(q, n, length_factor(q, n, call.scale, call.l2_norm), work.q);
    widen_row(k, n, length_factor(k, n, 1.0f, call.l2_norm), work.k);
    const float* decay = call.log_decay + t * call.ldd + head * call.decays;
    const Vec same = exp(set1(*decay));
    for_each_vector(n, [&](long i, long part) {
        const Vec d = call.decays == 1 ? same : exp(load_part(decay + i, part));
        store(work.decay + i, d);
        store(work.kept + i, load(work.k + i) * d);
    });
}

// Token t of kVectors vectors of columns, the last of `part` lanes: v and out at the first of them.
template <int kVectors, class T, class S>
inline void advance_columns(S* state, long stride, long key_size, const Work<S>& work, const T* v, float beta, T* out,
                            long part) {
    const auto lanes = [&](int j) { return j + 1 < kVectors ? W : part; };
    Vec even[kVectors], odd[kVectors];
    for (int j = 0; j < kVectors; ++j) even[j] = odd[j] = zero();
    const auto recall = [&](long key, Vec* sums) {
        const Vec factor = set1(work.kept[key]);
        const S* row = state + key * stride;
        for (int j = 0; j < kVectors; ++j) sums[j] = fma(factor, load_part(row + j * W, lanes(j)), sums[j]);
    };
    long key = 0;
    for (; key + 2 <= key_size; key += 2) {
        recall(key, even);
        recall(key + 1, odd);
    }
    if (key < key_size) recall(key, even);

    Vec written[kVectors], sum[kVectors];
    for (int j = 0; j < kVectors; ++j) {
        written[j] = set1(beta) * (load_part(v + j * W, lanes(j)) - (even[j] + odd[j]));
        sum[j] = zero();
    }
    for (key = 0; key < key_size; ++key) {
        const Vec decay = set1(work.decay[key]), k = set1(work.k[key]), q = set1(work.q[key]);
        S* row = state + key * stride;
        for (int j = 0; j < kVectors; ++j) {
            const Vec after = fma(k, written[j], load_part(row + j * W, lanes(j)) * decay);
            store_part(row + j * W, after, lanes(j));
            sum[j] = fma(q, after, sum[j]);
        }
    }
    for (int j = 0; j < kVectors; ++j) store_part(out + j * W, sum[j], lanes(j));
}

template <class T, class S>
void gated_delta_rule(Pool& pool, const Delta<T, S>& call) {
    const long keys = call.key_size, values = call.value_size, parts_of_head = (values + kColumns - 1) / kColumns;
    for_each_part(pool, call.batch, call.value_heads * parts_of_head, [&](long seq, long part) {
        const long head = part / parts_of_head, first = part % parts_of_head * kColumns;
        const long columns = std::min(kColumns, values - first);
        const Work<S> work(keys);
        const StateBlock<S> block(call.state, call.value_heads * keys * values,
                                  {head * keys * values + first, keys, columns, values}, call.batch.slots[seq],
                                  work.spare);
        const auto run = [&](long begin, long end) {
            for (long t = begin; t < end; ++t) {
                prepare(call, t, head, work);
                const float beta = call.beta[t * call.ldbeta + head];
                const T* v = call.v + t * call.ldv + head * values + first;
                T* out = call.out + (t * call.value_heads + head) * values + first;
                S* state = block.row(0);
                if (columns == kColumns) {
                    advance_columns<4>(state, block.stride(), keys, work, v, beta, out, W);
                    continue;
                }
                for_each_vector(columns, [&](long i, long lanes) {
                    advance_columns<1>(state + i, block.stride(), keys, work, v + i, beta, out + i, lanes);
                });
            }
        };
        for_each_stretch(call.batch, seq, run, [&](long slot) { block.copy_to(slot); });
    });
}

}  // namespace

// Tokens are ldq, ldk, ldv, ldd and ldbeta apart; state [slots, value_heads, key_size, value_size],
// out [tokens, value_heads, value_size].
#define FOREBAY_DELTA(T, S, suffix)                                                                                  \
    extern "C" void fb_gated_delta_rule_##suffix(                                                                    \
        Pool* pool, const T* q, long ldq, const T* k, long ldk, const T* v, long ldv, const float* log_decay,        \
        long ldd, long decays, const float* beta, long ldbeta, S* state, FOREBAY_BATCH, T* out, long key_heads,      \
        long value_heads, long key_size, long value_size, float scale, long l2_norm) {                               \
        gated_delta_rule(*pool, Delta<T, S>{q, ldq, k, ldk, v, ldv, log_decay, ldd, decays, beta, ldbeta, state,     \
                                            FOREBAY_BATCH_OF_ARGUMENTS, out, key_heads, value_heads, key_size,       \
                                            value_size, scale, l2_norm != 0});                                       \
    }

FOREBAY_DELTA(float, float, f32_f32)
FOREBAY_DELTA(float, bf16, f32_bf16)
FOREBAY_DELTA(bf16, float, bf16_f32)
FOREBAY_DELTA(bf16, bf16, bf16_bf16)

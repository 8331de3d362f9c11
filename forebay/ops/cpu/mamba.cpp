// Mamba's state-space scans, a token at a time. Shape letters as in recurrence.py.
//
// In Mamba-2 a head's state is [state size, head size] and its columns do not touch each other: a part is four vectors of
// them. In Mamba-1 the channels do not touch each other, and a part is some of them.
#include "activations.h"
#include "recurrence.h"

namespace {

constexpr long kTokens = 8;     // prepared at a time, in Mamba-2
constexpr long kChannels = 64;  // of a part, in Mamba-1

template <class T, class S>
struct Mamba2 {
    const T* x;  // token t's heads at t * ldx
    long ldx;
    const T* dt;
    long lddt;
    const float* a;
    const T* b;
    long ldb;
    const T* c;
    long ldc;
    const float* d;
    const float* dt_bias;
    S* state;
    StateBatch batch;
    T* out;
    long heads;
    long groups;
    long head_size;
    long state_size;
    float dt_min;
    float dt_max;
};

// What some tokens bring to all columns of a head.
struct Mamba2Tokens {
    long size;  // of a state's column, rounded up to whole vectors
    float* b;   // [kTokens][size]
    float* c;   // [kTokens][size]
    float dt[kTokens];
    float decay[kTokens];
};

// A few tokens at once, since the exponentials of one head's dt cost as much for one token as for a vector of them.
template <class T, class S>
void prepare(const Mamba2<T, S>& call, long head, long first, long count, Mamba2Tokens& tokens) {
    for (long t = 0; t < count; ++t) tokens.dt[t] = to_float(call.dt[(first + t) * call.lddt + head]);
    for_each_vector(count, [&](long i, long part) {
        const Vec dt = softplus(load_part(tokens.dt + i, part) + set1(call.dt_bias[head]));
        const Vec clamped = min(set1(call.dt_max), max(set1(call.dt_min), dt));
        store_part(tokens.dt + i, clamped, part);
        store_part(tokens.decay + i, exp(clamped * set1(call.a[head])), part);
    });
    const long n = call.state_size, group = head / (call.heads / call.groups);
    for (long t = 0; t < count; ++t) {
        widen_row(call.b + (first + t) * call.ldb + group * n, n, set1(1.0f), tokens.b + t * tokens.size);
        widen_row(call.c + (first + t) * call.ldc + group * n, n, set1(1.0f), tokens.c + t * tokens.size);
    }
}

// One token in kCount vectors of columns, `part` lanes each: x and out at the first of them.
template <int kCount, class T, class S>
FOREBAY_INLINE void advance_columns(S* state, long stride, long state_size, const float* b, const float* c, float dt,
                                    float decay, const T* x, float skip, T* out, long part) {
    Vec input[kCount], sum[kCount];
    for (int j = 0; j < kCount; ++j) {
        input[j] = set1(dt) * load_part(x + j * W, part);
        sum[j] = zero();
    }
    for (long n = 0; n < state_size; ++n) {
        const Vec bn = set1(b[n]), cn = set1(c[n]);
        S* row = state + n * stride;
        for (int j = 0; j < kCount; ++j) {
            const Vec after = fma(bn, input[j], load_part(row + j * W, part) * set1(decay));
            store_part(row + j * W, after, part);
            sum[j] = fma(cn, after, sum[j]);
        }
    }
    for (int j = 0; j < kCount; ++j) {
        store_part(out + j * W, fma(set1(skip), load_part(x + j * W, part), sum[j]), part);
    }
}

// The prepared tokens, from `first` on, in `columns` columns of a head that begin at its entry `entry` of all heads'.
template <class T, class S>
void advance_tokens(const Mamba2<T, S>& call, const StateBlock<S>& block, long head, long entry, long columns, long first,
                    long count, const Mamba2Tokens& tokens) {
    for_each_columns(columns, [&]<int kCount>(Count<kCount>, long column, long part) {
        for (long t = 0; t < count; ++t) {
            const T* x = call.x + (first + t) * call.ldx + entry + column;
            T* out = call.out + (first + t) * call.heads * call.head_size + entry + column;
            advance_columns<kCount>(block.at() + column, block.stride(), call.state_size, tokens.b + t * tokens.size,
                                    tokens.c + t * tokens.size, tokens.dt[t], tokens.decay[t], x, call.d[head], out,
                                    part);
        }
    });
}

template <class T, class S>
void mamba2_part(const Mamba2<T, S>& call, long seq, long head, long first_column, long columns) {
    const long n = call.state_size, size = round_up(n, W), p = call.head_size;
    float* memory = static_cast<float*>(thread_scratch(2 * kTokens * size * sizeof(float) + n * columns * sizeof(S)));
    Mamba2Tokens tokens{size, memory, memory + kTokens * size, {}, {}};
    const StateBlock<S> block(call.state, call.heads * n * p, {head * n * p + first_column, n, columns, p}, call.batch,
                              seq, reinterpret_cast<S*>(memory + 2 * kTokens * size));
    run_block(call.batch, seq, block, [&](long begin, long end) {
        for (long first = begin; first < end; first += kTokens) {
            const long count = std::min(kTokens, end - first);
            prepare(call, head, first, count, tokens);
            advance_tokens(call, block, head, head * p + first_column, columns, first, count, tokens);
        }
    });
}

template <class T, class S>
void mamba2_scan(Pool& pool, const Mamba2<T, S>& call) {
    const long parts_of_head = (call.head_size + kColumns - 1) / kColumns;
    for_each_part(pool, call.batch, call.heads * parts_of_head, [&](long seq, long part) {
        const long first = part % parts_of_head * kColumns;
        mamba2_part(call, seq, part / parts_of_head, first, std::min(kColumns, call.head_size - first));
    });
}

// `kRows` rows of state, `columns` each: state = state * decay(row, i) + x[row] * b, and returns state @ c of each row. b
// and c are padded with zeros to whole vectors. A row's result is the same whatever the number of rows.
template <int kRows, class S, class Decay>
FOREBAY_INLINE Quad advance_rows(S* state, long columns, const float* x, const float* b, const float* c, Decay decay) {
    Vec sum[4], input[kRows];
    for (int r = 0; r < kRows; ++r) input[r] = set1(x[r]);
    for (Vec& s : sum) s = zero();
    for_each_vector(columns, [&](long i, long part) FOREBAY_INLINE_LAMBDA {
        const Vec bi = load(b + i), ci = load(c + i);
        for (int r = 0; r < kRows; ++r) {
            S* at = state + r * columns + i;
            const Vec after = fma(load_part(at, part), decay(r, i, part), input[r] * bi);
            store_part(at, after, part);
            sum[r] = fma(after, ci, sum[r]);
        }
    });
    return hsum4(sum[0], sum[1], sum[2], sum[3]);
}

// As advance_rows, for any number of rows: decay_of(row) is the decay of the rows from there on, and finish(row, count,
// results) takes in up to four results.
template <class S, class DecayOf, class Finish>
void advance(S* state, long rows, long columns, const float* x, const float* b, const float* c, DecayOf decay_of,
             Finish finish) {
    long r = 0;
    for (; r + 4 <= rows; r += 4) {
        finish(r, 4, advance_rows<4>(state + r * columns, columns, x + r, b, c, decay_of(r)));
    }
    for (; r < rows; ++r) finish(r, 1, advance_rows<1>(state + r * columns, columns, x + r, b, c, decay_of(r)));
}

template <class T, class S>
struct Mamba1 {
    const T* x;
    long ldx;
    const T* dt;
    long lddt;
    const float* a;  // [channels, state_size]
    const T* b;
    long ldb;
    const T* c;
    long ldc;
    const float* d;
    const float* dt_bias;
    S* state;
    StateBatch batch;
    T* out;
    long channels;
    long state_size;
};

// What one token brings to the channels of a part.
struct Mamba1Token {
    float* b;  // [columns], zeros behind
    float* c;
    float dt[kChannels];
    float x[kChannels];  // dt' x
};

template <class T, class S>
void prepare(const Mamba1<T, S>& call, long first, long count, long t, Mamba1Token& token) {
    const T *x = call.x + t * call.ldx + first, *dt = call.dt + t * call.lddt + first;
    for_each_vector(count, [&](long i, long part) {
        const Vec width = softplus(load_part(dt + i, part) + load_part(call.dt_bias + first + i, part));
        store_part(token.dt + i, width, part);
        store_part(token.x + i, width * load_part(x + i, part), part);
    });
    widen_row(call.b + t * call.ldb, call.state_size, set1(1.0f), token.b);
    widen_row(call.c + t * call.ldc, call.state_size, set1(1.0f), token.c);
}

template <class T, class S>
void advance_token(const Mamba1<T, S>& call, S* state, long first, long count, const Mamba1Token& token, long t) {
    const long n = call.state_size;
    const T* x = call.x + t * call.ldx + first;
    const float* skip = call.d + first;
    T* out = call.out + t * call.channels + first;
    advance(
        state, count, n, token.x, token.b, token.c,
        [&](long row) {
            const float *a = call.a + (first + row) * n, *dt = token.dt + row;
            return [=](int r, long i, long part) { return exp(load_part(a + r * n + i, part) * set1(dt[r])); };
        },
        [=](long r, long some, Quad y) {
            store4(out + r, y + load4(skip + r, some) * load4(x + r, some), some);
        });
}

template <class T, class S>
void mamba1_scan(Pool& pool, const Mamba1<T, S>& call) {
    const long n = call.state_size, columns = round_up(n, W);
    for_each_part(pool, call.batch, (call.channels + kChannels - 1) / kChannels, [&](long seq, long part) {
        const long first = part * kChannels, count = std::min(kChannels, call.channels - first);
        float* memory = static_cast<float*>(thread_scratch(2 * columns * sizeof(float) + count * n * sizeof(S)));
        Mamba1Token token{memory, memory + columns, {}, {}};
        const StateBlock<S> block(call.state, call.channels * n, {first * n, 1, count * n, count * n}, call.batch, seq,
                                  reinterpret_cast<S*>(memory + 2 * columns));
        run_block(call.batch, seq, block, [&](long begin, long end) {
            for (long t = begin; t < end; ++t) {
                prepare(call, first, count, t, token);
                advance_token(call, block.at(), first, count, token, t);
            }
        });
    });
}

}  // namespace

// Tokens are ldx, lddt, ldb and ldc apart in x, dt, b and c; out [tokens, heads, head_size].
#define FOREBAY_MAMBA(T, S, suffix)                                                                                   \
    extern "C" void fb_mamba2_scan_##suffix(                                                                          \
        Pool* pool, const T* x, long ldx, const T* dt, long lddt, const float* a, const T* b, long ldb, const T* c,   \
        long ldc, const float* d, const float* dt_bias, S* state, FOREBAY_BATCH, T* out, long heads, long groups,     \
        long head_size, long state_size, float dt_min, float dt_max) {                                                \
        pool->op([=](Pool& p) {                                                                                       \
            mamba2_scan(p, Mamba2<T, S>{x,                                                                            \
                                        ldx,                                                                          \
                                        dt,                                                                           \
                                        lddt,                                                                         \
                                        a,                                                                            \
                                        b,                                                                            \
                                        ldb,                                                                          \
                                        c,                                                                            \
                                        ldc,                                                                          \
                                        d,                                                                            \
                                        dt_bias,                                                                      \
                                        state,                                                                        \
                                        FOREBAY_BATCH_OF_ARGUMENTS,                                                   \
                                        out,                                                                          \
                                        heads,                                                                        \
                                        groups,                                                                       \
                                        head_size,                                                                    \
                                        state_size,                                                                   \
                                        dt_min,                                                                       \
                                        dt_max});                                                                     \
        });                                                                                                           \
    }                                                                                                                 \
    extern "C" void fb_mamba1_scan_##suffix(Pool* pool, const T* x, long ldx, const T* dt, long lddt, const float* a, \
                                            const T* b, long ldb, const T* c, long ldc, const float* d,               \
                                            const float* dt_bias, S* state, FOREBAY_BATCH, T* out, long channels,     \
                                            long state_size) {                                                        \
        pool->op([=](Pool& p) {                                                                                       \
            mamba1_scan(p, Mamba1<T, S>{x, ldx, dt, lddt, a, b, ldb, c, ldc, d, dt_bias, state,                       \
                                        FOREBAY_BATCH_OF_ARGUMENTS, out, channels, state_size});                      \
        });                                                                                                           \
    }

FOREBAY_MAMBA(float, float, f32_f32)
FOREBAY_MAMBA(float, bf16, f32_bf16)
FOREBAY_MAMBA(bf16, float, bf16_f32)
FOREBAY_MAMBA(bf16, bf16, bf16_bf16)

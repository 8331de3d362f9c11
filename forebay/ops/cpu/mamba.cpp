// Mamba's state-space scans, a token at a time.
//
// The state's rows (the entries of a head in Mamba-2, the channels in Mamba-1) do not touch each other: a part is as many
// rows as L1 holds. Shape letters as in recurrence.py.
#include <memory>

#include "activations.h"
#include "recurrence.h"

namespace {

constexpr long kPartBytes = 16384;  // of float32 state: half of the smallest L1
constexpr long kChannels = 64;      // of a part, in Mamba-1
constexpr long kPrepareGrain = 16;  // tokens

long rows_of_part(long row_entries) {
    return std::max(4L, kPartBytes / static_cast<long>(sizeof(float)) / row_entries / 4 * 4);
}

// `kRows` rows of state, `columns` each: state = state * decay(row, i) + x[row] * b, and returns state @ c of each row. b
// and c are padded with zeros to whole vectors. A row's result is the same whatever the number of rows.
template <int kRows, class S, class Decay>
inline __m128 advance_rows(S* state, long columns, const float* x, const float* b, const float* c, Decay decay) {
    Vec sum[4], input[kRows];
    for (int r = 0; r < kRows; ++r) input[r] = set1(x[r]);
    for (Vec& s : sum) s = zero();
    for_each_vector(columns, [&](long i, long part) {
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

// One item's working memory, from the thread's scratch.
template <class S>
struct Work {
    float* x;      // [rows]: the step's width times the input
    float* width;  // [rows]
    S* spare;      // [rows][columns]

    Work(long rows, long columns) {
        const long padded = round_up(rows, W);
        x = static_cast<float*>(thread_scratch(2 * padded * sizeof(float) + rows * columns * sizeof(S)));
        width = x + padded;
        spare = reinterpret_cast<S*>(width + padded);
    }
};

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

// What parts share, in float32 and for all tokens at once: it would cost a part as much as its own work.
struct Prepared {
    long columns;  // state_size padded with zeros to whole vectors
    std::unique_ptr<float[]> memory;
    float* b;       // [tokens, groups, columns]
    float* c;       // [tokens, groups, columns]
    float* widths;  // [tokens, heads]
    float* decays;  // [tokens, heads]

    Prepared(long tokens, long groups, long heads, long state_size) : columns(round_up(state_size, W)) {
        const long rows = tokens * groups * columns, steps = tokens * heads;
        memory = std::make_unique_for_overwrite<float[]>(2 * (rows + steps));
        b = memory.get();
        c = b + rows;
        widths = c + rows;
        decays = widths + steps;
    }
};

template <class T>
void widen_groups(const T* from, long groups, long state_size, long columns, float* to) {
    for (long g = 0; g < groups; ++g) widen_row(from + g * state_size, state_size, set1(1.0f), to + g * columns);
}

template <class T, class S>
void prepare_token(const Mamba2<T, S>& call, long t, const Prepared& ready) {
    const long row = t * call.groups * ready.columns, step = t * call.heads;
    widen_groups(call.b + t * call.ldb, call.groups, call.state_size, ready.columns, ready.b + row);
    widen_groups(call.c + t * call.ldc, call.groups, call.state_size, ready.columns, ready.c + row);
    const Vec least = set1(call.dt_min), most = set1(call.dt_max);
    for_each_vector(call.heads, [&](long i, long part) {
        const Vec raw = load_part(call.dt + t * call.lddt + i, part) + load_part(call.dt_bias + i, part);
        const Vec width = min(most, max(least, softplus(raw)));
        store_part(ready.widths + step + i, width, part);
        store_part(ready.decays + step + i, exp(width * load_part(call.a + i, part)), part);
    });
}

template <class T, class S>
void mamba2_scan(Pool& pool, const Mamba2<T, S>& call) {
    const Prepared ready(call.batch.num_tokens(), call.groups, call.heads, call.state_size);
    pool.run(call.batch.num_tokens(), kPrepareGrain, [&](long t, long end) {
        for (; t < end; ++t) prepare_token(call, t, ready);
    });
    const long p = call.head_size, n = call.state_size, most = std::min(p, rows_of_part(n));
    const long parts_of_head = (p + most - 1) / most;
    for_each_part(pool, call.batch, call.heads * parts_of_head, [&](long seq, long part) {
        const long head = part / parts_of_head, first = part % parts_of_head * most, rows = std::min(most, p - first);
        const long group = head / (call.heads / call.groups), entry = head * p + first;
        const Work<S> work(rows, n);
        const StateBlock<S> block(call.state, call.heads * p * n, {entry * n, rows, n, n}, call.batch.slots[seq],
                                  work.spare);
        const __m128 skip = _mm_set1_ps(call.d[head]);
        const auto run = [&](long begin, long end) {
            for (long t = begin; t < end; ++t) {
                const T* x = call.x + t * call.ldx + entry;
                T* out = call.out + t * call.heads * p + entry;
                const Vec decay = set1(ready.decays[t * call.heads + head]);
                const long row = (t * call.groups + group) * ready.columns;
                widen_row(x, rows, set1(ready.widths[t * call.heads + head]), work.x);
                advance(
                    block.row(0), rows, n, work.x, ready.b + row, ready.c + row,
                    [=](long) { return [=](int, long, long) { return decay; }; },
                    [=](long r, long count, __m128 y) {
                        store4(out + r, _mm_add_ps(y, _mm_mul_ps(skip, load4(x + r, count))), count);
                    });
            }
        };
        for_each_stretch(call.batch, seq, run, [&](long slot) { block.copy_to(slot); });
    });
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

template <class T, class S>
void mamba1_scan(Pool& pool, const Mamba1<T, S>& call) {
    const long n = call.state_size, columns = round_up(n, W), tokens = call.batch.num_tokens();
    const auto memory = std::make_unique_for_overwrite<float[]>(2 * tokens * columns);
    float *b = memory.get(), *c = b + tokens * columns;
    for (long t = 0; t < tokens; ++t) {
        widen_row(call.b + t * call.ldb, n, set1(1.0f), b + t * columns);
        widen_row(call.c + t * call.ldc, n, set1(1.0f), c + t * columns);
    }
    const long parts = (call.channels + kChannels - 1) / kChannels;
    for_each_part(pool, call.batch, parts, [&](long seq, long part) {
        const long first = part * kChannels, rows = std::min(kChannels, call.channels - first);
        const Work<S> work(rows, n);
        const StateBlock<S> block(call.state, call.channels * n, {first * n, rows, n, n}, call.batch.slots[seq],
                                  work.spare);
        const auto run = [&](long begin, long end) {
            for (long t = begin; t < end; ++t) {
                const T *x = call.x + t * call.ldx + first, *dt = call.dt + t * call.lddt + first;
                const float* skip = call.d + first;
                T* out = call.out + t * call.channels + first;
                for_each_vector(rows, [&](long i, long part) {
                    const Vec width = softplus(load_part(dt + i, part) + load_part(call.dt_bias + first + i, part));
                    store(work.width + i, width);
                    store(work.x + i, width * load_part(x + i, part));
                });
                const auto decay_of = [&](long r0) {
                    const float *a = call.a + (first + r0) * n, *width = work.width + r0;
                    return [=](int r, long i, long part) { return exp(load_part(a + r * n + i, part) * set1(width[r])); };
                };
                advance(block.row(0), rows, n, work.x, b + t * columns, c + t * columns, decay_of,
                        [=](long r, long count, __m128 y) {
                            const __m128 skipped = _mm_mul_ps(load4(skip + r, count), load4(x + r, count));
                            store4(out + r, _mm_add_ps(y, skipped), count);
                        });
            }
        };
        for_each_stretch(call.batch, seq, run, [&](long slot) { block.copy_to(slot); });
    });
}

}  // namespace

// Tokens are ldx, lddt, ldb and ldc apart in x, dt, b and c; out [tokens, heads, head_size].
#define FOREBAY_MAMBA(T, S, suffix)                                                                                    \
    extern "C" void fb_mamba2_scan_##suffix(                                                                           \
        Pool* pool, const T* x, long ldx, const T* dt, long lddt, const float* a, const T* b, long ldb, const T* c,    \
        long ldc, const float* d, const float* dt_bias, S* state, FOREBAY_BATCH, T* out, long heads, long groups,      \
        long head_size, long state_size, float dt_min, float dt_max) {                                                 \
        mamba2_scan(*pool, Mamba2<T, S>{x, ldx, dt, lddt, a, b, ldb, c, ldc, d, dt_bias, state,                        \
                                        FOREBAY_BATCH_OF_ARGUMENTS, out, heads, groups, head_size, state_size, dt_min, \
                                        dt_max});                                                                      \
    }                                                                                                                  \
    extern "C" void fb_mamba1_scan_##suffix(Pool* pool, const T* x, long ldx, const T* dt, long lddt, const float* a,  \
                                            const T* b, long ldb, const T* c, long ldc, const float* d,                \
                                            const float* dt_bias, S* state, FOREBAY_BATCH, T* out, long channels,      \
                                            long state_size) {                                                         \
        mamba1_scan(*pool, Mamba1<T, S>{x, ldx, dt, lddt, a, b, ldb, c, ldc, d, dt_bias, state,                        \
                                        FOREBAY_BATCH_OF_ARGUMENTS, out, channels, state_size});                       \
    }

FOREBAY_MAMBA(float, float, f32_f32)
FOREBAY_MAMBA(float, bf16, f32_bf16)
FOREBAY_MAMBA(bf16, float, bf16_f32)
FOREBAY_MAMBA(bf16, bf16, bf16_bf16)

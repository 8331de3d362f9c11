// Mamba's state-space scans, a token at a time.
//
// The state's rows (the entries of a head in Mamba-2, the channels in Mamba-1) do not touch each other: a part is as many
// rows as L1 holds. Shape letters as in recurrence.py.
#include <memory>

#include "activations.h"
#include "recurrence.h"

namespace {

constexpr long kPartBytes = 16384;  // of float32 state: half of the smallest L1

long rows_of_part(long row_entries) {
    return std::max(4L, kPartBytes / static_cast<long>(sizeof(float)) / row_entries / 4 * 4);
}

// `Row` rows of state, `columns` each: state = state * decay(row, i) + x[row] * b, and sums[row] = state @ c. b and c are
// padded with zeros to whole vectors. Every row's sum is the same whatever the number of rows.
template <int kRows, class S, class Decay>
inline void advance_rows(S* state, long columns, const float* x, const float* b, const float* c, const Decay& decay,
                         float* sums) {
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
    alignas(16) float all[4];
    _mm_store_ps(all, hsum4(sum[0], sum[1], sum[2], sum[3]));
    for (int r = 0; r < kRows; ++r) sums[r] = all[r];
}

// As advance_rows, for any number of rows; decay_of(row) makes the decay of the rows from there on.
template <class S, class DecayOf>
void advance(S* state, long rows, long columns, const float* x, const float* b, const float* c,
             const DecayOf& decay_of, float* sums) {
    long r = 0;
    for (; r + 4 <= rows; r += 4) advance_rows<4>(state + r * columns, columns, x + r, b, c, decay_of(r), sums + r);
    for (; r < rows; ++r) advance_rows<1>(state + r * columns, columns, x + r, b, c, decay_of(r), sums + r);
}

// One item's working memory, from the thread's scratch: four vectors and a spare block of state.
template <class S>
struct Work {
    float* x;      // [rows]: the step's width times the input
    float* width;  // [rows]
    float* sums;   // [rows]
    float* b;      // [columns]
    float* c;      // [columns]
    S* spare;      // [rows][columns]

    Work(long rows, long columns) {
        const long r = round_up(rows, W), d = round_up(columns, W);
        x = static_cast<float*>(thread_scratch((3 * r + 2 * d) * sizeof(float) + rows * columns * sizeof(S)));
        width = x + r;
        sums = width + r;
        b = sums + r;
        c = b + d;
        spare = reinterpret_cast<S*>(c + d);
    }
};

// out [n] = sums + d * x, with d of each entry.
template <class T, class SkipOf>
void store_outputs(const T* x, const float* sums, const SkipOf& skip_of, long n, T* out) {
    for_each_vector(n, [&](long i, long part) {
        store_part(out + i, fma(skip_of(i, part), load_part(x + i, part), load_part(sums + i, part)), part);
    });
}

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

// The steps' widths and decays, [tokens, heads] each: an exp for one head costs as much as for a vector of them.
template <class T, class S>
void find_steps(Pool& pool, const Mamba2<T, S>& call, float* widths, float* decays) {
    const Vec least = set1(call.dt_min), most = set1(call.dt_max);
    pool.run(call.batch.num_tokens(), 64, [&](long begin, long end) {
        for (long t = begin; t < end; ++t) {
            for_each_vector(call.heads, [&](long i, long part) {
                const Vec raw = load_part(call.dt + t * call.lddt + i, part) + load_part(call.dt_bias + i, part);
                const Vec width = min(most, max(least, softplus(raw)));
                store_part(widths + t * call.heads + i, width, part);
                store_part(decays + t * call.heads + i, exp(width * load_part(call.a + i, part)), part);
            });
        }
    });
}

template <class T, class S>
void mamba2_scan(Pool& pool, const Mamba2<T, S>& call) {
    const long steps = call.batch.num_tokens() * call.heads;
    const auto memory = std::make_unique_for_overwrite<float[]>(2 * steps);
    const float *widths = memory.get(), *decays = widths + steps;
    find_steps(pool, call, memory.get(), memory.get() + steps);

    const long p = call.head_size, n = call.state_size, most = std::min(p, rows_of_part(n));
    const long parts_of_head = (p + most - 1) / most;
    for_each_part(pool, call.batch, call.heads * parts_of_head, [&](long seq, long part) {
        const long head = part / parts_of_head, first = part % parts_of_head * most, rows = std::min(most, p - first);
        const long group = head / (call.heads / call.groups), entry = head * p + first;
        const Work<S> work(rows, n);
        const StateBlock<S> block(call.state, call.heads * p * n, {entry * n, rows, n, n}, call.batch.slots[seq],
                                  work.spare);
        const Vec skip = set1(call.d[head]);
        const auto run = [&](long begin, long end) {
            for (long t = begin; t < end; ++t) {
                const T* x = call.x + t * call.ldx + entry;
                const Vec decay = set1(decays[t * call.heads + head]);
                widen_row(x, rows, set1(widths[t * call.heads + head]), work.x);
                widen_row(call.b + t * call.ldb + group * n, n, set1(1.0f), work.b);
                widen_row(call.c + t * call.ldc + group * n, n, set1(1.0f), work.c);
                advance(block.row(0), rows, n, work.x, work.b, work.c,
                        [&](long) { return [=](int, long, long) { return decay; }; }, work.sums);
                store_outputs(x, work.sums, [=](long, long) { return skip; }, rows,
                              call.out + (t * call.heads) * p + entry);
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
    const long n = call.state_size, most = std::min(call.channels, rows_of_part(n));
    const long parts = (call.channels + most - 1) / most;
    for_each_part(pool, call.batch, parts, [&](long seq, long part) {
        const long first = part * most, rows = std::min(most, call.channels - first);
        const Work<S> work(rows, n);
        const StateBlock<S> block(call.state, call.channels * n, {first * n, rows, n, n}, call.batch.slots[seq],
                                  work.spare);
        const auto run = [&](long begin, long end) {
            for (long t = begin; t < end; ++t) {
                const T *x = call.x + t * call.ldx + first, *dt = call.dt + t * call.lddt + first;
                for_each_vector(rows, [&](long i, long part) {
                    const Vec width = softplus(load_part(dt + i, part) + load_part(call.dt_bias + first + i, part));
                    store(work.width + i, width);
                    store(work.x + i, width * load_part(x + i, part));
                });
                widen_row(call.b + t * call.ldb, n, set1(1.0f), work.b);
                widen_row(call.c + t * call.ldc, n, set1(1.0f), work.c);
                const auto decay_of = [&](long r0) {
                    const float *a = call.a + (first + r0) * n, *width = work.width + r0;
                    return [=](int r, long i, long part) { return exp(load_part(a + r * n + i, part) * set1(width[r])); };
                };
                advance(block.row(0), rows, n, work.x, work.b, work.c, decay_of, work.sums);
                store_outputs(x, work.sums, [&](long i, long part) { return load_part(call.d + first + i, part); }, rows,
                              call.out + t * call.channels + first);
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

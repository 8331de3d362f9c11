// Hyper-connections: residual streams of a token, [streams, hidden] side by side, and the weights that mix them.
#include <cmath>

#include "activations.h"
#include "pool.h"
#include "rows.h"

namespace {

// The linear layer that weights come from, and what follows it: see `Mixing` of ops/reference/streams.py.
struct Mixing {
    const float* fn;  // [weights, width]
    const float* scale;
    const float* base;  // [weights]
    long width;         // of all streams together
    long streams;
    float norm_eps;
    float eps;
};

float dot(const float* a, const float* b, long n) {
    Vec even = zero(), odd = zero();
    long i = 0;
    for (; i + 2 * W <= n; i += 2 * W) {
        even = fma(load(a + i), load(b + i), even);
        odd = fma(load(a + i + W), load(b + i + W), odd);
    }
    for_each_vector(n - i, [&](long j, long part) {
        even = fma(load_part(a + i + j, part), load_part(b + i + j, part), even);
    });
    return hsum(even + odd);
}

float sigmoid_of(float x) { return 1.0f / (1.0f + std::exp(-x)); }

// The first `count` outputs of the linear layer of a token's normed streams.
template <class T>
void logits_of(const Mixing& mixing, const T* streams, long count, float* wide, float* logits) {
    for_each_vector(mixing.width, [&](long i, long part) { store_part(wide + i, load_part(streams + i, part), part); });
    const float mean = sum_of_squares(wide, mixing.width) / static_cast<float>(mixing.width);
    const float inverse = 1.0f / std::sqrt(mean + mixing.norm_eps);
    for (long j = 0; j < count; ++j) logits[j] = dot(mixing.fn + j * mixing.width, wide, mixing.width) * inverse;
}

// Each entry of m [n, n] divided by the sum of its row, or with `columns` of its column.
void normalize(float* m, long n, bool columns, float eps) {
    const long step = columns ? n : 1, next = columns ? 1 : n;
    for (long i = 0; i < n; ++i) {
        float sum = 0;
        for (long j = 0; j < n; ++j) sum += m[i * next + j * step];
        for (long j = 0; j < n; ++j) m[i * next + j * step] /= sum + eps;
    }
}

// logits [n, n] become a matrix whose rows and columns have sums of 1.
void sinkhorn(float* m, long n, float eps, long iterations) {
    for (long i = 0; i < n; ++i) {
        float* row = m + i * n;
        const float top = *std::max_element(row, row + n);
        float sum = 0;
        for (long j = 0; j < n; ++j) sum += row[j] = std::exp(row[j] - top);
        for (long j = 0; j < n; ++j) row[j] = row[j] / sum + eps;
    }
    normalize(m, n, true, eps);
    for (long i = 1; i < iterations; ++i) {
        normalize(m, n, false, eps);
        normalize(m, n, true, eps);
    }
}

template <class T>
void mix_weights(Pool& pool, const Mixing& mixing, long iterations, const T* streams, float* before, float* behind,
                 float* between, long rows) {
    const long n = mixing.streams;
    pool.run(rows, 1, [=](long begin, long end) {
        auto* wide = static_cast<float*>(thread_scratch((mixing.width + (2 + n) * n) * sizeof(float)));
        float* logits = wide + mixing.width;
        for (long r = begin; r < end; ++r) {
            logits_of(mixing, streams + r * mixing.width, (2 + n) * n, wide, logits);
            for (long i = 0; i < (2 + n) * n; ++i) {
                logits[i] = logits[i] * mixing.scale[i < n ? 0 : i < 2 * n ? 1 : 2] + mixing.base[i];
            }
            for (long i = 0; i < n; ++i) {
                before[r * n + i] = sigmoid_of(logits[i]) + mixing.eps;
                behind[r * n + i] = 2 * sigmoid_of(logits[n + i]);
            }
            std::copy_n(logits + 2 * n, n * n, between + r * n * n);
            sinkhorn(between + r * n * n, n, mixing.eps, iterations);
        }
    });
}

template <class T>
void last_weights(Pool& pool, const Mixing& mixing, const T* streams, float* weights, long rows) {
    const long n = mixing.streams;
    pool.run(rows, 1, [=](long begin, long end) {
        auto* wide = static_cast<float*>(thread_scratch(mixing.width * sizeof(float)));
        for (long r = begin; r < end; ++r) {
            logits_of(mixing, streams + r * mixing.width, n, wide, weights + r * n);
            for (long i = r * n; i < (r + 1) * n; ++i) {
                weights[i] = sigmoid_of(weights[i] * mixing.scale[0] + mixing.base[i - r * n]) + mixing.eps;
            }
        }
    });
}

// out [rows, hidden] = the sum of streams, each times its weight.
template <class T>
void collapse(Pool& pool, const T* streams, const float* weights, T* out, long rows, long n, long hidden) {
    pool.run(rows, grain_for(n * hidden), [=](long begin, long end) {
        for (long r = begin; r < end; ++r) {
            const T* from = streams + r * n * hidden;
            for_each_vector(hidden, [&](long i, long part) {
                Vec sum = zero();
                for (long j = 0; j < n; ++j) sum = fma(set1(weights[r * n + j]), load_part(from + j * hidden + i, part), sum);
                store_part(out + r * hidden + i, sum, part);
            });
        }
    });
}

// In place: stream j becomes the sum over i of between[i, j] times stream i.
template <class T>
void mix(Pool& pool, T* streams, const float* between, long rows, long n, long hidden) {
    constexpr long kMostStreams = 16;  // of families/deepseek_v4/config.py
    pool.run(rows, grain_for(n * n * hidden), [=](long begin, long end) {
        for (long r = begin; r < end; ++r) {
            T* own = streams + r * n * hidden;
            const float* weights = between + r * n * n;
            for_each_vector(hidden, [&](long i, long part) {
                Vec before[kMostStreams];
                for (long j = 0; j < n; ++j) before[j] = load_part(own + j * hidden + i, part);
                for (long j = 0; j < n; ++j) {
                    Vec sum = zero();
                    for (long k = 0; k < n; ++k) sum = fma(set1(weights[k * n + j]), before[k], sum);
                    store_part(own + j * hidden + i, sum, part);
                }
            });
        }
    });
}

template <class T>
void spread(Pool& pool, const T* x, const float* weights, T* out, long rows, long n, long hidden) {
    pool.run(rows, grain_for(n * hidden), [=](long begin, long end) {
        for (long r = begin; r < end; ++r) {
            for (long j = 0; j < n; ++j) {
                const Vec weight = set1(weights[r * n + j]);
                T* to = out + (r * n + j) * hidden;
                for_each_vector(hidden, [&](long i, long part) {
                    store_part(to + i, weight * load_part(x + r * hidden + i, part), part);
                });
            }
        }
    });
}

// How far each stream of x agrees with that of y, out [rows, n].
template <class T>
void match(Pool& pool, const T* x, const T* y, T* out, long rows, long n, long hidden) {
    pool.run(rows * n, grain_for(2 * hidden), [&](long at, long stop) {
        for (; at < stop; ++at) {
            const T *a = x + at * hidden, *b = y + at * hidden;
            Vec sum = zero();
            for_each_vector(hidden, [&](long i, long part) FOREBAY_INLINE_LAMBDA {
                sum = fma(load_part(a + i, part), load_part(b + i, part), sum);
            });
            const float agreed = hsum(sum) / std::sqrt(static_cast<float>(hidden));
            const float size = std::sqrt(std::max(std::fabs(agreed), 1e-6f));
            store_part(out + at, set1(agreed > 0 ? size : agreed < 0 ? -size : agreed), 1);
        }
    });
}

}  // namespace

// fn [weights, width], where width is that of all n streams of a token together.
#define FOREBAY_STREAMS(T, suffix)                                                                                  \
    extern "C" void fb_mix_weights_##suffix(Pool* pool, const T* streams, const float* fn, const float* scale,      \
                                            const float* base, float* before, float* behind, float* between,        \
                                            long rows, long width, long n, long iterations, float norm_eps,         \
                                            float eps) {                                                            \
        const Mixing mixing{fn, scale, base, width, n, norm_eps, eps};                                              \
        pool->op([=](Pool& p) { mix_weights(p, mixing, iterations, streams, before, behind, between, rows); });     \
    }                                                                                                               \
    extern "C" void fb_last_weights_##suffix(Pool* pool, const T* streams, const float* fn, const float* scale,     \
                                             const float* base, float* weights, long rows, long width, long n,      \
                                             float norm_eps, float eps) {                                           \
        const Mixing mixing{fn, scale, base, width, n, norm_eps, eps};                                              \
        pool->op([=](Pool& p) { last_weights(p, mixing, streams, weights, rows); });                                \
    }                                                                                                               \
    extern "C" void fb_collapse_streams_##suffix(Pool* pool, const T* streams, const float* weights, T* out,        \
                                                 long rows, long n, long hidden) {                                  \
        pool->op([=](Pool& p) { collapse(p, streams, weights, out, rows, n, hidden); });                            \
    }                                                                                                               \
    extern "C" void fb_mix_streams_##suffix(Pool* pool, T* streams, const float* between, long rows, long n,        \
                                            long hidden) {                                                          \
        pool->op([=](Pool& p) { mix(p, streams, between, rows, n, hidden); });                                      \
    }                                                                                                               \
    extern "C" void fb_spread_streams_##suffix(Pool* pool, const T* x, const float* weights, T* out, long rows,     \
                                               long n, long hidden) {                                               \
        pool->op([=](Pool& p) { spread(p, x, weights, out, rows, n, hidden); });                                    \
    }                                                                                                               \
    extern "C" void fb_match_streams_##suffix(Pool* pool, const T* x, const T* y, T* out, long rows, long n,        \
                                              long hidden) {                                                        \
        pool->op([=](Pool& p) { match(p, x, y, out, rows, n, hidden); });                                           \
    }

FOREBAY_STREAMS(float, f32)
FOREBAY_STREAMS(bf16, bf16)

// Ops on each row by itself: norms, embedding rows, argmax.
#include <algorithm>
#include <cmath>

#include "moments.h"
#include "pool.h"
#include "rows.h"

namespace {

// Most words forbid everything: those are stores alone.
void mask_row(float* x, const uint32_t* words, long n) {
    constexpr float kNever = -std::numeric_limits<float>::infinity();
    for (long first = 0; first < n; first += 32) {
        const uint32_t word = words[first / 32];
        const long count = std::min(32L, n - first);
        if (word == 0) {
            std::fill_n(x + first, count, kNever);
        } else if (word != ~0u) {
            for (long j = 0; j < count; ++j) x[first + j] = word >> j & 1 ? x[first + j] : kNever;
        }
    }
}

template <class T>
void norm_row(const T* x, const T* weight, T* out, long n, float eps) {
    const Vec scale = set1(1.0f / std::sqrt(sum_of_squares(x, n) / static_cast<float>(n) + eps));
    for_each_vector(n, [&](long i, long part) {
        store_part(out + i, load_part(weight + i, part) * (load_part(x + i, part) * scale), part);
    });
}

// x: row (i, j) at i * outer_stride + j * inner_stride; out contiguous.
template <class T>
void rms_norm(Pool& pool, const T* x, long outer_stride, long inner, long inner_stride, const T* weight, T* out,
              long rows, long n, float eps) {
    pool.run(rows, grain_for(n), [=](long begin, long end) {
        for (long r = begin; r < end; ++r) {
            norm_row(x + r / inner * outer_stride + r % inner * inner_stride, weight, out + r * n, n, eps);
        }
    });
}

// Rows are found as those of `rms_norm`; the i-th of `inner` rows has weights and biases i * own_step behind the first.
template <class T>
void layer_norm(Pool& pool, const T* x, long outer_stride, long inner, long inner_stride, const T* weight,
                const T* bias, long own_step, T* out, long rows, long n, float eps) {
    pool.run(rows, grain_for(2 * n), [=](long begin, long end) {
        for (long r = begin; r < end; ++r) {
            const T* row = x + r / inner * outer_stride + r % inner * inner_stride;
            const long own = r % inner * own_step;
            const Moments moments = moments_of(row, n);
            const Vec mean = set1(moments.mean), scale = set1(1.0f / std::sqrt(moments.variance + eps));
            for_each_vector(n, [&](long i, long part) {
                const Vec normed = (load_part(row + i, part) - mean) * scale;
                const Vec shift = bias == nullptr ? zero() : load_part(bias + own + i, part);
                store_part(out + r * n + i, fma(normed, load_part(weight + own + i, part), shift), part);
            });
        }
    });
}

// out = x, with the root of the mean square of `like`; the mean square of x counts as `least` if it is less.
template <class T>
void match_rms(Pool& pool, const T* x, long ldx, const T* like, long ldl, T* out, long rows, long n, float least) {
    pool.run(rows, grain_for(3 * n), [=](long begin, long end) {
        for (long r = begin; r < end; ++r) {
            const float own = std::max(sum_of_squares(x + r * ldx, n) / static_cast<float>(n), least);
            const Vec factor = set1(std::sqrt(sum_of_squares(like + r * ldl, n) / static_cast<float>(n) / own));
            for_each_vector(n, [&](long i, long part) {
                store_part(out + r * n + i, load_part(x + r * ldx + i, part) * factor, part);
            });
        }
    });
}

template <class T>
void add_rms_norm(Pool& pool, const T* x, T* residual, const T* weight, T* out, long rows, long n, float eps) {
    pool.run(rows, grain_for(n), [=](long begin, long end) {
        for (long r = begin; r < end; ++r) {
            for_each_vector(n, [&](long i, long part) {
                const long at = r * n + i;
                store_part(residual + at, load_part(residual + at, part) + load_part(x + at, part), part);
            });
            norm_row(residual + r * n, weight, out + r * n, n, eps);
        }
    });
}

// The first maximum of a row, or -1 if the row holds a NaN or +inf, or nothing but -inf.
long argmax_row(const float* row, long n) {
    constexpr float kInf = std::numeric_limits<float>::infinity();
    const long whole = n / W * W;
    Vec top = set1(-kInf);
    unsigned nan = 0;
    for (long i = 0; i < whole; i += W) {
        const Vec x = load(row + i);
        top = max(x, top);
        nan |= nan_lanes(x);
    }
    float best = hmax(top);
    for (long i = whole; i < n; ++i) {
        best = std::max(best, row[i]);
        nan |= std::isnan(row[i]);
    }
    if (nan != 0 || std::isinf(best)) return -1;
    for (long i = 0; i < whole; i += W) {
        const unsigned equal = equal_lanes(load(row + i), set1(best));
        if (equal != 0) return i + __builtin_ctz(equal);
    }
    return std::find(row + whole, row + n, best) - row;
}

template <class T>
void finite_rows(Pool& pool, const T* x, uint8_t* finite, long rows, long n) {
    pool.run(rows, grain_for(n), [=](long begin, long end) {
        for (long r = begin; r < end; ++r) finite[r] = is_finite(x + r * n, n);
    });
}

}  // namespace

// rows, n: how many rows and how long; x rows are n apart unless a stride is given; out never overlaps the inputs.
#define FOREBAY_ROWWISE(T, suffix)                                                                                 \
    void fb_rms_norm_##suffix(Pool* pool, const T* x, long outer_stride, long inner, long inner_stride,            \
                              const T* weight, T* out, long rows, long n, float eps) {                             \
        pool->op([=](Pool& p) { rms_norm(p, x, outer_stride, inner, inner_stride, weight, out, rows, n, eps); });  \
    }                                                                                                              \
    void fb_layer_norm_##suffix(Pool* pool, const T* x, long outer_stride, long inner, long inner_stride,          \
                                const T* weight, const T* bias, long own_step, T* out, long rows, long n,          \
                                float eps) {                                                                       \
        pool->op([=](Pool& p) {                                                                                    \
            layer_norm(p, x, outer_stride, inner, inner_stride, weight, bias, own_step, out, rows, n, eps);        \
        });                                                                                                        \
    }                                                                                                              \
    void fb_add_rms_norm_##suffix(Pool* pool, const T* x, T* residual, const T* weight, T* out, long rows, long n, \
                                  float eps) {                                                                     \
        pool->op([=](Pool& p) { add_rms_norm(p, x, residual, weight, out, rows, n, eps); });                       \
    }                                                                                                              \
    void fb_match_rms_##suffix(Pool* pool, const T* x, long ldx, const T* like, long ldl, T* out, long rows, long n,   \
                               float least) {                                                                      \
        pool->op([=](Pool& p) { match_rms(p, x, ldx, like, ldl, out, rows, n, least); });                          \
    }                                                                                                              \
    void fb_finite_rows_##suffix(Pool* pool, const T* x, uint8_t* finite, long rows, long n) {                     \
        pool->op([=](Pool& p) { finite_rows(p, x, finite, rows, n); });                                            \
    }

extern "C" {

FOREBAY_ROWWISE(float, f32)
FOREBAY_ROWWISE(bf16, bf16)

// ids [rows] in 0..table rows; a table row is row_bytes long.
void fb_embedding(Pool* pool, const int64_t* ids, const char* table, char* out, long rows, long row_bytes) {
    pool->op([=](Pool& p) {
        p.run(rows, grain_for(row_bytes), [=](long begin, long end) {
            for (long r = begin; r < end; ++r) std::memcpy(out + r * row_bytes, table + ids[r] * row_bytes, row_bytes);
        });
    });
}

// ids [rows] in 0..table rows; a row of the table has n entries, which are widened.
void fb_embedding_f32_of_bf16(Pool* pool, const int64_t* ids, const bf16* table, float* out, long rows, long n) {
    pool->op([=](Pool& p) {
        p.run(rows, grain_for(n), [=](long begin, long end) {
            for (long r = begin; r < end; ++r) {
                for_each_vector(n, [&](long i, long part) {
                    store_part(out + r * n + i, load_part(table + ids[r] * n + i, part), part);
                });
            }
        });
    });
}

// logits [rows, n] -> ids [rows], finite [rows] 0 or 1.
void fb_argmax_rows(Pool* pool, const float* logits, int64_t* ids, uint8_t* finite, long rows, long n) {
    pool->op([=](Pool& p) {
        p.run(rows, grain_for(n), [=](long begin, long end) {
            for (long r = begin; r < end; ++r) {
                const long id = argmax_row(logits + r * n, n);
                finite[r] = id >= 0;
                ids[r] = std::max(id, 0L);
            }
        });
    });
}

// logits [.., n] become -inf in row at[r] where bit j % 32 of words[r * width + j / 32] is not set.
void fb_mask_logits(Pool* pool, float* logits, const int64_t* at, const uint32_t* words, long rows, long n,
                    long width) {
    pool->op([=](Pool& p) {
        p.run(rows, grain_for(n), [=](long begin, long end) {
            for (long r = begin; r < end; ++r) mask_row(logits + at[r] * n, words + r * width, n);
        });
    });
}
}

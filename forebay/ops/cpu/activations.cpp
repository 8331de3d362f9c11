// Gated activations, and the norm that has a gate: each row by itself.
#include "activations.h"

#include <algorithm>
#include <cmath>

#include "moments.h"
#include "pool.h"
#include "rows.h"

namespace {

// As zip_rows of the two halves of rows x, each n long.
template <class T, class F>
void zip_halves(Pool& pool, const T* x, long ldx, T* out, long rows, long n, const F& f) {
    zip_rows(pool, x, ldx, x + n, ldx, out, n, rows, n, f);
}

enum class Gelu : long { kTanh = 0, kExact = 1 };

template <class T>
void gelu_and_mul(Pool& pool, const T* x, long ldx, T* out, long rows, long n, Gelu form) {
    if (form == Gelu::kExact) {
        zip_halves(pool, x, ldx, out, rows, n, [](Vec gate, Vec up) { return gelu_exact(gate) * up; });
    } else {
        zip_halves(pool, x, ldx, out, rows, n, [](Vec gate, Vec up) { return gelu_tanh(gate) * up; });
    }
}

template <class T>
void gelu(Pool& pool, const T* x, long ldx, T* out, long rows, long n, Gelu form) {
    if (form == Gelu::kExact) {
        zip_rows(pool, x, ldx, x, ldx, out, n, rows, n, [](Vec a, Vec) { return gelu_exact(a); });
    } else {
        zip_rows(pool, x, ldx, x, ldx, out, n, rows, n, [](Vec a, Vec) { return gelu_tanh(a); });
    }
}

// Of a row's gates, those that are `deviations` standard deviations above their mean or more open what they gate.
template <class T>
void sparse_gelu_and_mul(Pool& pool, const T* x, long ldx, T* out, long rows, long n, float deviations) {
    pool.run(rows, grain_for(4 * n), [=](long begin, long end) {
        for (long r = begin; r < end; ++r) {
            const T* gate = x + r * ldx;
            const Moments moments = moments_of(gate, n);
            const Vec cut = set1(moments.mean + deviations * std::sqrt(moments.variance));
            for_each_vector(n, [&](long i, long part) {
                const Vec open = gelu_tanh(max(zero(), load_part(gate + i, part) - cut));
                store_part(out + r * n + i, open * load_part(gate + n + i, part), part);
            });
        }
    });
}

template <class T>
void clamped_swiglu(Pool& pool, const T* x, long ldx, T* out, long rows, long n, Vec alpha, Vec limit, Vec offset) {
    zip_halves(pool, x, ldx, out, rows, n,
               [=](Vec gate, Vec up) { return clamped_swiglu(gate, up, alpha, limit, offset); });
}

struct GatedNorm {
    long group_size;
    long weight_step;  // from one group's weights to the next's: group_size, or 0 if all share them
    float eps;
    bool norm_first;
    bool sigmoid;
};

// One group of n: x and gate in place, `products` [n] for what is normed.
template <class T, bool kSigmoid>
void gated_norm_group(const T* x, const T* gate, const T* weight, T* out, long n, float eps, bool norm_first,
                      float* products) {
    const auto opened = [&](long i, long part) {
        const Vec g = load_part(gate + i, part);
        return kSigmoid ? sigmoid(g) : silu(g);
    };
    for_each_vector(n, [&](long i, long part) {
        const Vec value = load_part(x + i, part);
        store_part(products + i, norm_first ? value : value * opened(i, part), part);
    });
    const Vec scale = set1(1.0f / std::sqrt(sum_of_squares(products, n) / static_cast<float>(n) + eps));
    for_each_vector(n, [&](long i, long part) {
        const Vec normed = load_part(products + i, part) * scale * load_part(weight + i, part);
        store_part(out + i, norm_first ? normed * opened(i, part) : normed, part);
    });
}

template <class T>
void gated_rms_norm(Pool& pool, const T* x, long ldx, const T* gate, long ldg, const T* weight, T* out, long rows,
                    long n, const GatedNorm& norm) {
    const auto group = norm.sigmoid ? gated_norm_group<T, true> : gated_norm_group<T, false>;
    pool.run(rows, grain_for(4 * n), [=](long begin, long end) {
        float* products = static_cast<float*>(thread_scratch(norm.group_size * sizeof(float)));
        for (long r = begin; r < end; ++r) {
            for (long i = 0; i < n; i += norm.group_size) {
                group(x + r * ldx + i, gate + r * ldg + i, weight + i / norm.group_size * norm.weight_step,
                      out + r * n + i, norm.group_size, norm.eps, norm.norm_first, products);
            }
        }
    });
}

}  // namespace

// Rows of x are ldx apart, those of out n; the gated ones take [gate | up] rows of 2 n.
#define FOREBAY_ACTIVATIONS(T, suffix)                                                                                 \
    void fb_silu_and_mul_##suffix(Pool* pool, const T* x, long ldx, T* out, long rows, long n) {                       \
        pool->op(                                                                                                      \
            [=](Pool& p) { zip_halves(p, x, ldx, out, rows, n, [](Vec gate, Vec up) { return silu(gate) * up; }); });  \
    }                                                                                                                  \
    void fb_gelu_and_mul_##suffix(Pool* pool, const T* x, long ldx, T* out, long rows, long n, long exact) {           \
        pool->op([=](Pool& p) { gelu_and_mul(p, x, ldx, out, rows, n, static_cast<Gelu>(exact)); });                   \
    }                                                                                                                  \
    void fb_sparse_gelu_and_mul_##suffix(Pool* pool, const T* x, long ldx, T* out, long rows, long n,                  \
                                         float deviations) {                                                           \
        pool->op([=](Pool& p) { sparse_gelu_and_mul(p, x, ldx, out, rows, n, deviations); });                          \
    }                                                                                                                  \
    void fb_clamped_swiglu_##suffix(Pool* pool, const T* x, long ldx, T* out, long rows, long n, float alpha,          \
                                    float limit, float offset) {                                                       \
        pool->op([=](Pool& p) {                                                                                        \
            clamped_swiglu(p, x, ldx, out, rows, n, set1(alpha), set1(limit), set1(offset));                           \
        });                                                                                                            \
    }                                                                                                                  \
    void fb_relu2_##suffix(Pool* pool, const T* x, long ldx, T* out, long rows, long n) {                              \
        pool->op([=](Pool& p) { zip_rows(p, x, ldx, x, ldx, out, n, rows, n, [](Vec a, Vec) { return relu2(a); }); }); \
    }                                                                                                                  \
    void fb_xielu_##suffix(Pool* pool, const T* x, long ldx, T* out, long rows, long n, float alpha_p, float alpha_n,  \
                           float beta, float eps) {                                                                    \
        const Vec p = set1(alpha_p), m = set1(alpha_n), b = set1(beta), e = set1(eps);                                 \
        pool->op([=](Pool& on) {                                                                                       \
            zip_rows(on, x, ldx, x, ldx, out, n, rows, n, [=](Vec a, Vec) { return xielu(a, p, m, b, e); });           \
        });                                                                                                            \
    }                                                                                                                  \
    void fb_gelu_##suffix(Pool* pool, const T* x, long ldx, T* out, long rows, long n, long exact) {                   \
        pool->op([=](Pool& p) { gelu(p, x, ldx, out, rows, n, static_cast<Gelu>(exact)); });                           \
    }                                                                                                                  \
    void fb_gated_rms_norm_##suffix(Pool* pool, const T* x, long ldx, const T* gate, long ldg, const T* weight,        \
                                    T* out, long rows, long n, long group_size, long weight_step, float eps,           \
                                    long norm_first, long sigmoid) {                                                   \
        pool->op([=](Pool& p) {                                                                                        \
            gated_rms_norm(p, x, ldx, gate, ldg, weight, out, rows, n,                                                 \
                           {group_size, weight_step, eps, norm_first != 0, sigmoid != 0});                             \
        });                                                                                                            \
    }

extern "C" {

FOREBAY_ACTIVATIONS(float, f32)
FOREBAY_ACTIVATIONS(bf16, bf16)
}

// Entries of two rows with each other, or of one with a constant, and blocks of them from one place to another.
#include <cstdint>
#include <cstring>

#include "activations.h"
#include "pool.h"
#include "rows.h"

namespace {

// out = x * sigmoid(gate): each of a row's gates is for n / gates entries.
template <class T>
void mul_sigmoid(Pool& pool, const T* x, long ldx, const T* gate, long ldg, T* out, long ldo, long rows, long n,
                 long gates) {
    const auto open = [](Vec a, Vec g) { return a * sigmoid(g); };
    if (gates == n) return zip_rows(pool, x, ldx, gate, ldg, out, ldo, rows, n, open);
    const long span = n / gates;
    pool.run(rows, grain_for(2 * n), [=](long begin, long end) {
        for (long r = begin; r < end; ++r) {
            for (long g = 0; g < gates; ++g) {
                const Vec shared = set1(to_float(gate[r * ldg + g]));
                for_each_vector(span, [&](long i, long part) {
                    const long at = g * span + i;
                    store_part(out + r * ldo + at, open(load_part(x + r * ldx + at, part), shared), part);
                });
            }
        }
    });
}

// x = f(x), entry by entry.
template <class T, class F>
void map_rows(Pool& pool, T* x, long rows, long n, const F& f) {
    pool.run(rows, grain_for(n), [=](long begin, long end) {
        for_each_vector((end - begin) * n, [&](long i, long part) {
            T* at = x + begin * n + i;
            store_part(at, f(load_part(at, part)), part);
        });
    });
}

// Row r of x *= table[at[r]].
template <class T>
void scale_rows(Pool& pool, T* x, long ldx, const float* table, const int64_t* at, long rows, long n) {
    pool.run(rows, grain_for(n), [=](long begin, long end) {
        for (long r = begin; r < end; ++r) {
            const Vec factor = set1(table[at[r]]);
            for_each_vector(n, [&](long i, long part) {
                T* place = x + r * ldx + i;
                store_part(place, load_part(place, part) * factor, part);
            });
        }
    });
}

}  // namespace

// Rows of x, y and out are ldx, ldy and ldo apart; out may be x.
#define FOREBAY_ELEMENTWISE(T, suffix)                                                                                \
    void fb_mul_##suffix(Pool* pool, const T* x, long ldx, const T* y, long ldy, T* out, long ldo, long rows,         \
                         long n) {                                                                                    \
        pool->op(                                                                                                     \
            [=](Pool& p) { zip_rows(p, x, ldx, y, ldy, out, ldo, rows, n, [](Vec a, Vec b) { return a * b; }); });    \
    }                                                                                                                 \
    void fb_add_##suffix(Pool* pool, const T* x, long ldx, const T* y, long ldy, T* out, long ldo, long rows,         \
                         long n) {                                                                                    \
        pool->op(                                                                                                     \
            [=](Pool& p) { zip_rows(p, x, ldx, y, ldy, out, ldo, rows, n, [](Vec a, Vec b) { return a + b; }); });    \
    }                                                                                                                 \
    void fb_mul_silu_##suffix(Pool* pool, const T* x, long ldx, const T* gate, long ldg, T* out, long ldo, long rows, \
                              long n) {                                                                               \
        pool->op([=](Pool& p) {                                                                                       \
            zip_rows(p, x, ldx, gate, ldg, out, ldo, rows, n, [](Vec a, Vec g) { return silu(g) * a; });              \
        });                                                                                                           \
    }                                                                                                                 \
    void fb_mul_sigmoid_##suffix(Pool* pool, const T* x, long ldx, const T* gate, long ldg, T* out, long ldo,         \
                                 long rows, long n, long gates) {                                                     \
        pool->op([=](Pool& p) { mul_sigmoid(p, x, ldx, gate, ldg, out, ldo, rows, n, gates); });                      \
    }                                                                                                                 \
    void fb_scale_##suffix(Pool* pool, T* x, long rows, long n, float factor) {                                       \
        pool->op([=](Pool& p) { map_rows(p, x, rows, n, [=](Vec a) { return a * set1(factor); }); });                 \
    }                                                                                                                 \
    void fb_scale_rows_##suffix(Pool* pool, T* x, long ldx, const float* table, const int64_t* at, long rows,         \
                                long n) {                                                                             \
        pool->op([=](Pool& p) { scale_rows(p, x, ldx, table, at, rows, n); });                                        \
    }

extern "C" {

FOREBAY_ELEMENTWISE(float, f32)
FOREBAY_ELEMENTWISE(bf16, bf16)

// x [rows, n] in bfloat16.
void fb_narrow(Pool* pool, const float* x, bf16* out, long rows, long n) {
    pool->op([=](Pool& p) {
        p.run(rows, grain_for(n), [=](long begin, long end) {
            for_each_vector((end - begin) * n, [&](long i, long part) {
                store_part(out + begin * n + i, load_part(x + begin * n + i, part), part);
            });
        });
    });
}

void fb_softcap(Pool* pool, float* x, long rows, long n, float cap) {
    pool->op([=](Pool& p) { map_rows(p, x, rows, n, [=](Vec a) { return softcap(a, cap); }); });
}

// Block (i, j) of outer x inner, `bytes` long, lies i * outer stride + j * inner stride bytes behind `to` and `from`.
void fb_copy_blocks(Pool* pool, char* to, const char* from, long to_outer, long to_inner, long from_outer,
                    long from_inner, long outer, long inner, long bytes) {
    pool->op([=](Pool& p) {
        p.run(outer, grain_for(inner * bytes / 2), [=](long begin, long end) {
            for (long i = begin; i < end; ++i) {
                for (long j = 0; j < inner; ++j) {
                    std::memcpy(to + i * to_outer + j * to_inner, from + i * from_outer + j * from_inner, bytes);
                }
            }
        });
    });
}
}

// What touches q, k and v before attention: rotary embedding and the KV cache's writes.
#include <algorithm>
#include <limits>
#include <vector>

#include "pool.h"
#include "rows.h"

namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr long kGrain = 16;  // tokens: 16 x 12 heads x 64 is about what a wake-up is worth

// cos_sin_row: half cosines, then half sines. No fused multiply-add: torch rounds each product too.
template <class T>
void rotate_head(T* x, const float* cos_sin_row, long half) {
    for_each_vector(half, [&](long i, long part) {
        const Vec cos = load_part(cos_sin_row + i, part), sin = load_part(cos_sin_row + half + i, part);
        const Vec first = load_part(x + i, part), second = load_part(x + half + i, part);
        store_part(x + i, first * cos - second * sin, part);
        store_part(x + half + i, second * cos + first * sin, part);
    });
}

// Heads of a token side by side: token t's begin at `at` + t * stride.
template <class T>
struct Heads {
    T* at;
    long stride;
    long count;
    long dim;

    T* head(long token, long h) const { return at + token * stride + h * dim; }
};

// The rotation of a step's tokens; none where rotary_dim is 0. With `axes` a token has several positions, which are
// `axis_stride` apart, and frequency i's angle is that of position axes[i].
struct Rope {
    const int64_t* positions;
    long axis_stride;
    const float* cos_sin;  // [positions, rotary_dim]
    long rotary_dim;
    const int32_t* axes;

    // The cosines and sines of a token; `made` has room for them.
    const float* row(long token, float* made) const {
        if (axes == nullptr) return cos_sin + positions[token] * rotary_dim;
        const long half = rotary_dim / 2;
        for (long i = 0; i < half; ++i) {
            const float* at = cos_sin + positions[axes[i] * axis_stride + token] * rotary_dim + i;
            made[i] = at[0];
            made[half + i] = at[half];
        }
        return made;
    }

    template <class T>
    void apply(const Heads<T>& q, const Heads<T>& k, long token, float* made) const {
        if (rotary_dim == 0) return;
        const float* angles = row(token, made);
        for (long h = 0; h < q.count; ++h) rotate_head(q.head(token, h), angles, rotary_dim / 2);
        for (long h = 0; h < k.count; ++h) rotate_head(k.head(token, h), angles, rotary_dim / 2);
    }

    std::vector<float> room() const { return std::vector<float>(axes == nullptr ? 0 : rotary_dim); }
};

// Where heads are kept: slot s's at `at` + s * slot_stride, and for 8 bits the factors of each head [slots, heads].
template <class E>
struct Kept {
    E* at;
    long slot_stride;
    float* factors;
};

template <class T>
void keep(const Heads<T>& from, long token, const Kept<T>& to, long slot) {
    std::memcpy(to.at + slot * to.slot_stride, from.head(token, 0), from.count * from.dim * sizeof(T));
}
void keep(const Heads<float>& from, long token, const Kept<bf16>& to, long slot) {
    for_each_vector(from.count * from.dim, [&](long i, long part) {
        store_part(to.at + slot * to.slot_stride + i, load_part(from.head(token, 0) + i, part), part);
    });
}

// x = code * factor, the codes -127..127. The factor of a head that is not finite is NaN.
template <class T>
void keep(const Heads<T>& from, long token, const Kept<int8_t>& to, long slot) {
    for (long h = 0; h < from.count; ++h) {
        const T* x = from.head(token, h);
        Vec top = zero(), poison = zero();
        for_each_vector(from.dim, [&](long i, long part) {
            const Vec v = load_part(x + i, part);
            top = max(top, max(v, zero() - v));
            poison = fma(v, zero(), poison);
        });
        const float most = hmax(top);
        to.factors[slot * from.count + h] = most / 127 + hsum(poison);
        const Vec codes_per_unit = set1(most > 0 ? 127 / most : 0.0f);
        int8_t* codes = to.at + slot * to.slot_stride + h * from.dim;
        for_each_vector(from.dim, [&](long i, long part) {
            // The operand order matters: min and max return their second operand when one is NaN.
            const Vec scaled = round(load_part(x + i, part) * codes_per_unit);
            float lanes[W];
            store(lanes, max(min(scaled, set1(127)), set1(-127)));
            for (long j = 0; j < part; ++j) codes[i + j] = static_cast<int8_t>(lanes[j]);
        });
    }
}

// A token's own attention weighs its value with something, and whatever that is, a NaN comes out. So it shows in the
// token's hidden state that its key is not finite: by itself a key whose scores are -inf would not be seen before others
// read it.
template <class T>
void spoil(const Kept<T>& to, long slot, long h, long, long dim) {
    T* head = to.at + slot * to.slot_stride + h * dim;
    for_each_vector(dim, [&](long i, long part) { store_part(head + i, set1(kNaN), part); });
}

void spoil(const Kept<int8_t>& to, long slot, long h, long heads, long) {
    to.factors[slot * heads + h] = kNaN;
}

template <class T>
void apply_rope(Pool& pool, const Heads<T>& q, const Heads<T>& k, const Rope& rope, long tokens) {
    pool.run(tokens, kGrain, [=](long begin, long end) {
        std::vector<float> made = rope.room();
        for (long t = begin; t < end; ++t) rope.apply(q, k, t, made.data());
    });
}

// Of what is kept: what is finite may be too large for 16 bits.
template <class T, class E>
bool is_kept_finite(const Heads<T>& from, long token, const Kept<E>& to, long slot, long h) {
    if constexpr (sizeof(E) == 1) {
        return is_finite(from.head(token, h), from.dim);
    } else {
        return is_finite(to.at + slot * to.slot_stride + h * from.dim, from.dim);
    }
}

template <class T, class E>
void rope_and_store(Pool& pool, const Heads<T>& q, const Heads<T>& k, const Heads<T>& v, const Rope& rope,
                    const Kept<E>& k_kept, const Kept<E>& v_kept, const int64_t* loc, long tokens) {
    pool.run(tokens, rope.rotary_dim > 0 ? kGrain : 8 * kGrain, [=](long begin, long end) {
        std::vector<float> made = rope.room();
        for (long t = begin; t < end; ++t) {
            rope.apply(q, k, t, made.data());
            keep(k, t, k_kept, loc[t]);
            if (v.count > 0) keep(v, t, v_kept, loc[t]);
            for (long h = 0; h < k.count; ++h) {
                if (is_kept_finite(k, t, k_kept, loc[t], h)) continue;
                if (v.count > 0) {
                    spoil(v_kept, loc[t], h, v.count, v.dim);
                } else {
                    spoil(k_kept, loc[t], h, k.count, k.dim);
                }
            }
        }
    });
}

}  // namespace

// Token t's heads begin at q + t * ldq and k + t * ldk; positions are in 0..rows of cos_sin. `axes` may be null.
#define FOREBAY_ROPE(T, suffix)                                                                                    \
    extern "C" void fb_apply_rope_##suffix(Pool* pool, T* q, long ldq, long q_heads, T* k, long ldk, long k_heads, \
                                           long head_dim, const int64_t* positions, long axis_stride,              \
                                           const float* cos_sin, long rotary_dim, const int32_t* axes,             \
                                           long tokens) {                                                          \
        pool->op([=](Pool& p) {                                                                                    \
            apply_rope<T>(p, {q, ldq, q_heads, head_dim}, {k, ldk, k_heads, head_dim},                             \
                          {positions, axis_stride, cos_sin, rotary_dim, axes}, tokens);                            \
        });                                                                                                        \
    }

// Strides in elements; loc in 0..slots. Where two tokens share a slot (padding), either may win. v_heads 0: the values
// lie within the keys. Factors are null for caches of T.
#define FOREBAY_ROPE_AND_STORE(T, E, suffix)                                                                         \
    extern "C" void fb_rope_and_store_kv_##suffix(                                                                   \
        Pool* pool, T* q, long ldq, long q_heads, T* k, long ldk, long k_heads, T* v, long ldv, long v_heads,        \
        long head_dim, long v_dim, const int64_t* positions, long axis_stride, const float* cos_sin,                 \
        long rotary_dim, const int32_t* axes, E* k_cache, long k_slot, float* k_factors, E* v_cache, long v_slot,    \
        float* v_factors, const int64_t* loc, long tokens) {                                                         \
        pool->op([=](Pool& p) {                                                                                      \
            rope_and_store<T, E>(p, {q, ldq, q_heads, head_dim}, {k, ldk, k_heads, head_dim},                        \
                                 {v, ldv, v_heads, v_dim}, {positions, axis_stride, cos_sin, rotary_dim, axes},      \
                                 {k_cache, k_slot, k_factors}, {v_cache, v_slot, v_factors}, loc, tokens);           \
        });                                                                                                          \
    }

FOREBAY_ROPE(float, f32)
FOREBAY_ROPE(bf16, bf16)
FOREBAY_ROPE_AND_STORE(float, float, f32_f32)
FOREBAY_ROPE_AND_STORE(bf16, bf16, bf16_bf16)
FOREBAY_ROPE_AND_STORE(float, bf16, f32_bf16)
FOREBAY_ROPE_AND_STORE(float, int8_t, f32_i8)
FOREBAY_ROPE_AND_STORE(bf16, int8_t, bf16_i8)

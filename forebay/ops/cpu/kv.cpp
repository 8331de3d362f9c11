// What touches q, k and v before attention: rotary embedding and the KV cache's writes.
#include <algorithm>

#include "pool.h"
#include "simd.h"

namespace {

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

template <class T>
void apply_rope(Pool& pool, T* q, long ldq, long q_heads, T* k, long ldk, long k_heads, long head_dim,
                const int64_t* positions, const float* cos_sin, long rotary_dim, long tokens) {
    pool.run(tokens, kGrain, [=](long begin, long end) {
        for (long t = begin; t < end; ++t) {
            const float* row = cos_sin + positions[t] * rotary_dim;
            for (long h = 0; h < q_heads; ++h) rotate_head(q + t * ldq + h * head_dim, row, rotary_dim / 2);
            for (long h = 0; h < k_heads; ++h) rotate_head(k + t * ldk + h * head_dim, row, rotary_dim / 2);
        }
    });
}

}  // namespace

extern "C" {

// Token t's heads begin at q + t * ldq and k + t * ldk; positions are in 0..rows of cos_sin.
void fb_apply_rope_f32(Pool* pool, float* q, long ldq, long q_heads, float* k, long ldk, long k_heads, long head_dim,
                       const int64_t* positions, const float* cos_sin, long rotary_dim, long tokens) {
    pool->op([=](Pool& p) {
        apply_rope(p, q, ldq, q_heads, k, ldk, k_heads, head_dim, positions, cos_sin, rotary_dim, tokens);
    });
}

void fb_apply_rope_bf16(Pool* pool, bf16* q, long ldq, long q_heads, bf16* k, long ldk, long k_heads, long head_dim,
                        const int64_t* positions, const float* cos_sin, long rotary_dim, long tokens) {
    pool->op([=](Pool& p) {
        apply_rope(p, q, ldq, q_heads, k, ldk, k_heads, head_dim, positions, cos_sin, rotary_dim, tokens);
    });
}

// All strides and sizes in bytes: tokens are ldk and ldv apart, slots k_slot and v_slot; loc in 0..slots. Where two tokens
// share a slot (padding), either may win.
void fb_store_kv(Pool* pool, const char* k, long ldk, long k_bytes, const char* v, long ldv, long v_bytes,
                 char* k_cache, long k_slot, char* v_cache, long v_slot, const int64_t* loc, long tokens) {
    pool->op([=](Pool& p) {
        p.run(tokens, 8 * kGrain, [=](long begin, long end) {
            for (long t = begin; t < end; ++t) {
                std::memcpy(k_cache + loc[t] * k_slot, k + t * ldk, k_bytes);
                std::memcpy(v_cache + loc[t] * v_slot, v + t * ldv, v_bytes);
            }
        });
    });
}
}

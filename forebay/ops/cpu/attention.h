// What the attention kernels share: the call, the walk over pages, and the order in which a query adds up its keys.
//
// A query's keys are taken in blocks of kBlock positions, and blocks in segments of kSegment, which begin at multiples
// of these wherever pages and chunks begin. Within a segment a running softmax goes from block to block; segments are
// then added up in their order. So a query's bits do not depend on who else reads its keys, nor on which threads take
// which segments: blocks that many queries share may be read once for all of them (attention_plan.h).
//
// Keys and values may be of different sizes, and a slot's values may lie within its keys (latent attention).
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention_plan.h"
#include "simd.h"

// Where the heads of a slot lie: head h of slot s at s * slot_stride + h * head_stride. Entries of 8 bits have a factor
// for each head of a slot.
template <class E>
struct Cache {
    const E* at;
    long slot_stride;
    long head_stride;
    const float* factors;  // [slots, heads], or null
    long heads;

    const E* head(long slot, long h) const { return at + slot * slot_stride + h * head_stride; }
    float factor(long slot, long h) const { return factors[slot * heads + h]; }
};

// How products q k become scores: times `scale`, then, unless `cap` is 0, held within +-cap by tanh.
struct ScoreMap {
    float scale;
    float cap;
};

// T: of queries and results; E: of the caches' entries.
template <class T, class E>
struct AttentionCall {
    const AttentionShape& shape;
    const T* q;  // token t's heads at q + t * ldq
    long ldq;
    Cache<E> k_cache;
    Cache<E> v_cache;
    ScoreMap map;
    const float* sinks;  // [q_heads], or null
    T* out;              // [T, q_heads, v_dim]
};

// Lanes of a block, begin..end (may be empty).
struct Lanes {
    long begin;
    long end;
};

// What the query sees of the block that begins at position `first`.
inline Lanes visible(const Query& query, long first, long window) {
    const long end = std::min(kBlock, query.last + 1 - first);
    const long begin = window > 0 ? std::max(0L, query.position - window + 1 - first) : 0;
    return {begin, end};
}

// The slots of a block's positions that any query of a walk sees: `lanes` of them; the others are not set.
struct Block {
    Lanes lanes;
    long slots[kBlock];

    Block(const AttentionShape& shape, const Walk& walk, long first) {
        lanes.begin = visible(walk.queries[0], first, shape.window).begin;
        lanes.end = std::min(kBlock, walk.newest_position + 1 - first);
        const int32_t* page = shape.pages_of(walk.seq) + (first + lanes.begin) / shape.page_size;
        long in_page = (first + lanes.begin) % shape.page_size;
        for (long lane = lanes.begin; lane < lanes.end; ++page, in_page = 0) {
            const long cache_page = shape.page_map == nullptr ? *page : shape.page_map[*page];
            long slot = cache_page * shape.page_size + in_page;
            const long stop = std::min(lanes.end, lane + shape.page_size - in_page);
            for (; lane < stop; ++lane, ++slot) slots[lane] = slot;
        }
    }
};

// Fetches a block of all heads, little by little: fetched all at once, it would stop this core until it is there.
template <class T, class E>
class Prefetch {
  public:
    Prefetch(const AttentionCall<T, E>& call, const Walk& walk, const Block& block)
        : call_(call), head_(walk.first_head), lane_(block.lanes.begin), block_(block) {
        const AttentionShape& shape = call.shape;
        k_bytes_ = walk.num_heads * shape.head_dim * static_cast<long>(sizeof(E));
        const bool within_keys = static_cast<const void*>(call.k_cache.at) == call.v_cache.at;
        v_bytes_ = within_keys ? 0 : walk.num_heads * shape.v_dim * static_cast<long>(sizeof(E));
    }

    void lanes(long count) {
        for (const long end = std::min(lane_ + count, block_.lanes.end); lane_ < end; ++lane_) {
            fetch(call_.k_cache.head(block_.slots[lane_], head_), k_bytes_);
            fetch(call_.v_cache.head(block_.slots[lane_], head_), v_bytes_);
        }
    }

  private:
    static void fetch(const E* from, long bytes) {
        for (long i = 0; i < bytes; i += 64) __builtin_prefetch(reinterpret_cast<const char*>(from) + i);
    }

    const AttentionCall<T, E>& call_;
    const long head_;
    long lane_;
    const Block& block_;
    long k_bytes_;
    long v_bytes_;
};

// The C entry points, for a plan that has been made. The layouts are those of `AttentionCall`.
#define FOREBAY_ATTENTION(T, E, suffix, walk)                                                                    \
    extern "C" void fb_paged_attention_##suffix(                                                                 \
        Pool* pool, const SharedPlan* shared, const T* q, long ldq, const E* k_cache, long k_slot, long k_head,  \
        const float* k_factors, const E* v_cache, long v_slot, long v_head, const float* v_factors, float scale, \
        float cap, const float* sinks, T* out) {                                                                 \
        pool->op([=, plan = *shared](Pool& p) {                                                                  \
            const AttentionShape& shape = plan->shape;                                                           \
            const AttentionCall<T, E> call{shape,                                                                \
                                           q,                                                                    \
                                           ldq,                                                                  \
                                           {k_cache, k_slot, k_head, k_factors, shape.kv_heads},                 \
                                           {v_cache, v_slot, v_head, v_factors, shape.kv_heads},                 \
                                           {scale, cap},                                                         \
                                           sinks,                                                                \
                                           out};                                                                 \
            run_plan(p, *plan, [&](const Walk& now, const Walk& next, const Partials& partials) {                \
                walk(call, now, next, partials);                                                                 \
            });                                                                                                  \
        });                                                                                                      \
    }

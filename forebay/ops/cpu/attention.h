// What the attention kernels share: how ragged queries are cut into pieces of work, and the walk over pages.
//
// Keys and values may be of different sizes, and a slot's values may lie within its keys (latent attention). A piece is
// one KV head of up to kRows query rows (tokens x the heads of its group, token-major) of one sequence.
// It walks the keys in blocks of kBlock positions that begin at multiples of kBlock, wherever pages begin. A query adds
// the same blocks in the same order whether it comes alone or in a chunk; a block it may not see changes nothing in it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "pool.h"
#include "simd.h"

constexpr long kBlock = 64;  // key positions
constexpr long kRows = 64;   // query rows of a piece

// Where the heads of a slot lie: head h of slot s at s * slot_stride + h * head_stride.
template <class T>
struct Cache {
    const T* at;
    long slot_stride;
    long head_stride;

    const T* head(long slot, long h) const { return at + slot * slot_stride + h * head_stride; }
};

template <class T>
struct AttentionCall {
    Pool* pool;
    const T* q;  // token t's heads at q + t * ldq
    long ldq;
    Cache<T> k_cache;
    Cache<T> v_cache;
    const int32_t* page_table;  // [.., pages_per_row]
    long pages_per_row;
    const int32_t* page_map;  // from the table's pages to the caches'; null: they are the same
    const int32_t* rows;
    const int32_t* q_start;
    const int32_t* seq_lens;
    long num_seqs;
    long page_size;
    long q_heads;
    long kv_heads;
    long head_dim;  // of queries and keys
    long v_dim;
    float scale;
    long window;         // 0: none
    const float* sinks;  // [q_heads], or null
    T* out;              // [T, q_heads, v_dim]
};

struct Piece {
    long seq;
    long first_token;  // row of q
    long num_tokens;
    long first_position;  // of first_token
};

template <class T>
long group_size(const AttentionCall<T>& call) {
    return call.q_heads / call.kv_heads;
}

template <class T>
std::vector<Piece> cut(const AttentionCall<T>& call) {
    const long most = std::max(1L, kRows / group_size(call));
    std::vector<Piece> pieces;
    for (long s = 0; s < call.num_seqs; ++s) {
        const long begin = call.q_start[s], end = call.q_start[s + 1];
        for (long t = begin; t < end; t += most) {
            pieces.push_back({s, t, std::min(most, end - t), call.seq_lens[s] - (end - t)});
        }
    }
    return pieces;
}

// The positions of block `first`..`first + kBlock` that the query at `position` sees, as lanes begin..end (may be empty).
struct Lanes {
    long begin;
    long end;
};

inline Lanes visible(long position, long first, long window) {
    const long end = std::min(kBlock, position + 1 - first);
    const long begin = window > 0 ? std::max(0L, position - window + 1 - first) : 0;
    return {begin, end};
}

// Calls visit(lane, slot) for the positions first + begin..first + end.
template <class T, class Visit>
void for_each_key(const AttentionCall<T>& call, long seq, long first, Lanes lanes, const Visit& visit) {
    const int32_t* page = call.page_table + call.rows[seq] * call.pages_per_row + (first + lanes.begin) / call.page_size;
    long in_page = (first + lanes.begin) % call.page_size;
    for (long lane = lanes.begin; lane < lanes.end; ++page, in_page = 0) {
        const long cache_page = call.page_map == nullptr ? *page : call.page_map[*page];
        long slot = cache_page * call.page_size + in_page;
        const long stop = std::min(lanes.end, lane + call.page_size - in_page);
        for (; lane < stop; ++lane, ++slot) visit(lane, slot);
    }
}

// The running softmax of one query row (Milakov and Gimelshein, arXiv 1805.02867).
struct RowState {
    float top;
    float sum;
};

// A sink is a key that every query of the head sees first, and whose value is nothing.
template <class T>
RowState first_state(const AttentionCall<T>& call, long q_head) {
    if (call.sinks == nullptr) return {-std::numeric_limits<float>::infinity(), 0.0f};
    return {call.sinks[q_head], 1.0f};
}

// Turns scores [kBlock] into weights in place: exp(score * scale - new top) in the visible lanes, 0 elsewhere.
// Returns what the row's earlier sums must be multiplied with. A row that sees nothing keeps its state.
inline float softmax_block(float* scores, Lanes lanes, float scale, RowState& state) {
    constexpr float kInf = std::numeric_limits<float>::infinity();
    if (lanes.begin >= lanes.end) {
        for (long i = 0; i < kBlock; i += W) store(scores + i, zero());
        return 1.0f;
    }
    for (long i = 0; i < lanes.begin; ++i) scores[i] = -kInf;
    for (long i = lanes.end; i < kBlock; ++i) scores[i] = -kInf;
    Vec top = set1(state.top);
    for (long i = 0; i < kBlock; i += W) {
        const Vec x = load(scores + i) * set1(scale);
        store(scores + i, x);
        top = max(x, top);
    }
    const float new_top = hmax(top);
    Vec sum = zero();
    for (long i = 0; i < kBlock; i += W) {
        const Vec p = exp(load(scores + i) - set1(new_top));
        store(scores + i, p);
        sum = sum + p;
    }
    float shrink = 1.0f;  // exp(0), for the many blocks that hold no new maximum
    if (new_top != state.top) store_n(&shrink, exp(set1(state.top - new_top)), 1);
    state.top = new_top;
    state.sum = state.sum * shrink + hsum(sum);
    return shrink;
}

// The first position that any query of the piece sees.
template <class T>
long oldest_position(const AttentionCall<T>& call, const Piece& piece) {
    return call.window > 0 ? std::max(0L, piece.first_position - call.window + 1) : 0;
}

// Where the piece's walk begins.
template <class T>
long first_block(const AttentionCall<T>& call, const Piece& piece) {
    return oldest_position(call, piece) / kBlock * kBlock;
}

// One piece for some KV heads.
struct Item {
    const Piece* piece;
    long first_head;
    long num_heads;
};

// Runs attend(call, item, the item that this thread most likely takes next) until all heads of all pieces are done.
// A token's heads lie side by side in the caches: where there are pieces enough for all threads, an item that is small
// (decoding) takes all heads, and so reads whole lines of the caches in order.
template <class T, class Attend>
void for_each_item(const AttentionCall<T>& call, const Attend& attend) {
    const std::vector<Piece> pieces = cut(call);
    const bool many = static_cast<long>(pieces.size()) >= 4 * call.pool->num_threads();
    std::vector<Item> items;
    for (const Piece& piece : pieces) {
        const bool small = piece.num_tokens * call.q_heads <= kRows;
        const long heads = many && small ? call.kv_heads : 1;
        for (long head = 0; head < call.kv_heads; head += heads) items.push_back({&piece, head, heads});
    }
    const long count = static_cast<long>(items.size());
    call.pool->run(count, [&](long begin, long end) {
        for (long i = begin; i < end; ++i) attend(call, items[i], items[std::min(i + 1, count - 1)]);
    });
}

// The C entry point for T. The layouts are those of `AttentionCall`; every seq_lens[i] is at least its number of queries,
// and the pages of the positions that a query sees are slots of the caches.
#define FOREBAY_ATTENTION(T, suffix, attend)                                                                         \
    extern "C" void fb_paged_attention_##suffix(                                                                     \
        Pool* pool, const T* q, long ldq, const T* k_cache, long k_slot, long k_head, const T* v_cache, long v_slot, \
        long v_head, const int32_t* page_table, long pages_per_row, const int32_t* page_map, const int32_t* rows,    \
        const int32_t* q_start, const int32_t* seq_lens, long num_seqs, long page_size, long q_heads, long kv_heads, \
        long head_dim, long v_dim, float scale, long window, const float* sinks, T* out) {                           \
        pool->op([=](Pool& p) {                                                                                      \
            for_each_item(AttentionCall<T>{&p,                                                                       \
                                           q,                                                                        \
                                           ldq,                                                                      \
                                           {k_cache, k_slot, k_head},                                                \
                                           {v_cache, v_slot, v_head},                                                \
                                           page_table,                                                               \
                                           pages_per_row,                                                            \
                                           page_map,                                                                 \
                                           rows,                                                                     \
                                           q_start,                                                                  \
                                           seq_lens,                                                                 \
                                           num_seqs,                                                                 \
                                           page_size,                                                                \
                                           q_heads,                                                                  \
                                           kv_heads,                                                                 \
                                           head_dim,                                                                 \
                                           v_dim,                                                                    \
                                           scale,                                                                    \
                                           window,                                                                   \
                                           sinks,                                                                    \
                                           out},                                                                     \
                          attend);                                                                                   \
        });                                                                                                          \
    }

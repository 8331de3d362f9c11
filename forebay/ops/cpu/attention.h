// What the attention kernels share: how ragged queries are cut into pieces of work, and the walk over pages.
//
// A piece is one KV head of up to kRows query rows (tokens x the heads of its group, token-major) of one sequence. It
// walks the keys in blocks of kBlock positions that begin at multiples of kBlock, wherever pages begin. A query adds the
// same blocks in the same order whether it comes alone or in a chunk; a block it may not see changes nothing in it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "pool.h"
#include "simd.h"

constexpr long kBlock = 64;  // key positions
constexpr long kRows = 64;   // query rows of a piece

template <class T>
struct AttentionCall {
    Pool* pool;
    const T* q;  // token t's heads at q + t * ldq
    long ldq;
    const T* k_cache;  // [slots, kv_heads, head_dim]
    const T* v_cache;
    const int32_t* page_table;  // [.., pages_per_row]
    long pages_per_row;
    const int32_t* rows;
    const int32_t* q_start;
    const int32_t* seq_lens;
    long num_seqs;
    long page_size;
    long q_heads;
    long kv_heads;
    long head_dim;
    float scale;
    long window;  // 0: none
    T* out;       // [T, q_heads, head_dim]
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

template <class T>
long slot_of(const AttentionCall<T>& call, long seq, long position) {
    const int32_t* pages = call.page_table + call.rows[seq] * call.pages_per_row;
    return pages[position / call.page_size] * call.page_size + position % call.page_size;
}

// The running softmax of one query row (Milakov and Gimelshein, arXiv 1805.02867).
struct RowState {
    float top;
    float sum;
};

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

// Runs attend(call, piece, KV head) for every piece and head.
template <class T, class Attend>
void for_each_piece(const AttentionCall<T>& call, const Attend& attend) {
    const std::vector<Piece> pieces = cut(call);
    const long count = static_cast<long>(pieces.size());
    call.pool->run(count * call.kv_heads, 1, [&](long begin, long end) {
        for (long item = begin; item < end; ++item) attend(call, pieces[item / call.kv_heads], item % call.kv_heads);
    });
}

// The C entry point for T. The layouts are those of `AttentionCall`; every seq_lens[i] is at least its number of queries,
// and the pages of the positions that a query sees are slots of the caches.
#define FOREBAY_ATTENTION(T, suffix, attend)                                                                           \
    extern "C" void fb_paged_attention_##suffix(                                                                       \
        Pool* pool, const T* q, long ldq, const T* k_cache, const T* v_cache, const int32_t* page_table,               \
        long pages_per_row, const int32_t* rows, const int32_t* q_start, const int32_t* seq_lens, long num_seqs,       \
        long page_size, long q_heads, long kv_heads, long head_dim, float scale, long window, T* out) {                \
        for_each_piece(AttentionCall<T>{pool, q, ldq, k_cache, v_cache, page_table, pages_per_row, rows, q_start,      \
                                        seq_lens, num_seqs, page_size, q_heads, kv_heads, head_dim, scale, window,     \
                                        out},                                                                          \
                       attend);                                                                                        \
    }

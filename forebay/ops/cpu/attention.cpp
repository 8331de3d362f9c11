// Paged attention in float32 arithmetic, whatever the entries of queries and caches are.
//
// A head's keys of a block are turned round once for all rows (turned_keys.h), and its values are widened once. Products
// of queries and keys in bfloat16 are summed in pairs by the CPU's instruction for it, where it has one. Rows are
// taken a few at a time, whose scores, and then sums, stay in registers.
#include "attention_rows.h"
#include "turned_keys.h"

namespace {

// A walk's working memory, from the thread's scratch.
struct Work {
    long width;     // head_dim rounded up to what 16 bytes hold
    float* q;       // [rows][width], or in pairs in half of it
    float* keys;    // [width][kBlock], or in pairs in half of it
    float* values;  // [kBlock][v_width]
    float* scores;  // [kTile][kBlock]
    float* factors;  // [2][kBlock], of keys and values
    RowSums sums;
    RowSums total;

    Work(const AttentionShape& shape, long rows)
        : width(round_up(shape.head_dim, 16)), sums(nullptr, shape.v_dim), total(sums) {
        const long floats = rows * width + kBlock * (width + sums.v_width + kTile + 2) + 2 * rows * sums.row_floats;
        q = static_cast<float*>(thread_scratch(floats * sizeof(float)));
        keys = q + rows * width;
        values = keys + width * kBlock;
        scores = values + kBlock * sums.v_width;
        factors = scores + kTile * kBlock;
        sums.memory = factors + 2 * kBlock;
        total.memory = sums.memory + rows * sums.row_floats;
    }
};

// to [n rounded up to whole vectors] = from, zeros behind.
template <class E>
void widen_row(const E* from, long n, float* to) {
    for_each_vector(n, [&](long i, long part) { store(to + i, load_part(from + i, part)); });
}

// A row of queries as `score_rows` reads it.
template <bool kPairs, class T>
void keep_query(const T* from, long n, float* to) {
    if constexpr (kPairs) {
        std::memcpy(to, from, n * sizeof(T));
        std::memset(reinterpret_cast<char*>(to) + n * sizeof(T), 0, sizeof(T));
    } else {
        widen_row(from, n, to);
    }
}

// One head's keys of a block, its values if they are `widened`, and its factors if it has any; beside it `share` lanes of
// the next block are fetched.
template <class T, class E>
void read_head(const AttentionCall<T, E>& call, const Block& block, long kv_head, const Work& work,
               Prefetch<T, E>& next, long share, bool widened) {
    const AttentionShape& shape = call.shape;
    const long part = share * W / (2 * kBlock) + 1;
    for (long lane = 0; lane < kBlock; lane += W) {
        next.lanes(part);
        if (lane + W > block.lanes.begin && lane < block.lanes.end) {
            turn_keys<kInPairs<T, E>>(call.k_cache, block.slots, block.lanes, lane, kv_head, shape.head_dim, work.keys);
        } else {
            for (long dim = 0; dim < shape.head_dim; ++dim) store(work.keys + dim * kBlock + lane, zero());
        }
    }
    for (long lane = block.lanes.begin; lane < block.lanes.end; ++lane) {
        if (lane % W == 0) next.lanes(part);
        if (!widened) continue;
        widen_row(call.v_cache.head(block.slots[lane], kv_head), shape.v_dim, work.values + lane * work.sums.v_width);
    }
    if (call.k_cache.factors == nullptr) return;
    for (long lane = block.lanes.begin; lane < block.lanes.end; ++lane) {
        work.factors[lane] = call.k_cache.factor(block.slots[lane], kv_head);
        work.factors[kBlock + lane] = call.v_cache.factor(block.slots[lane], kv_head);
    }
}

// The values of a block, widened.
struct WidenedValues {
    const float* at;
    long width;

    const float* key(long lane) const { return at + lane * width; }
};

// As they lie in the cache: few rows widen them as they go, which needs no more loads than the others'.
template <class E>
struct KeptValues {
    const Cache<E>& cache;
    const long* slots;
    long kv_head;

    const E* key(long lane) const { return cache.head(slots[lane], kv_head); }
};

// kWide vectors of the sums of kCount rows, `row_floats` apart, += weights [kCount][kBlock] x values from `column` on.
template <int kCount, int kWide, class Values>
void add_columns(const float* weights, const Values& values, long column, Lanes lanes, float* sums, long row_floats) {
    Vec s[kCount][kWide];
    for (int r = 0; r < kCount; ++r) {
        for (int j = 0; j < kWide; ++j) s[r][j] = load(sums + r * row_floats + j * W);
    }
    for (long key = lanes.begin; key < lanes.end; ++key) {
        Vec v[kWide];
        for (int j = 0; j < kWide; ++j) v[j] = load(values.key(key) + column + j * W);
        for (int r = 0; r < kCount; ++r) {
            const Vec weight = set1(weights[r * kBlock + key]);
            for (int j = 0; j < kWide; ++j) s[r][j] = fma(weight, v[j], s[r][j]);
        }
    }
    for (int r = 0; r < kCount; ++r) {
        for (int j = 0; j < kWide; ++j) store(sums + r * row_floats + j * W, s[r][j]);
    }
}

template <int kCount, class Values>
void add_values(const Work& work, const Values& values, Lanes lanes, long row) {
    const long v_width = work.sums.v_width, row_floats = work.sums.row_floats;
    float* sums = work.sums.values(row);
    long i = 0;
    for (; i + kVectors * W <= v_width; i += kVectors * W) {
        add_columns<kCount, kVectors>(work.scores, values, i, lanes, sums + i, row_floats);
    }
    // v_width is a multiple of 32.
    if (i < v_width) {
        add_columns<kCount, 32 / W>(work.scores, values, i, lanes, sums + i, row_floats);
    }
}

// kCount rows of a walk from `row` on, the `first_of_head`-th of their head, over the block that begins at position
// `first`. What a row does not see has the weight zero. `factors` are the work's, or null.
template <int kCount, bool kPairs, class Values>
void add_rows(const AttentionShape& shape, ScoreMap map, const float* factors, const Walk& walk, long first,
              long first_of_head, long row, const Work& work, const Values& values) {
    const auto lanes_of = [&](long r) {
        return visible(walk.queries[(first_of_head + r) / shape.group()], first, shape.window);
    };
    const Lanes lanes{lanes_of(0).begin, lanes_of(kCount - 1).end};
    if (lanes.begin >= lanes.end) return;
    score_rows<kCount, kPairs>(work.q + row * work.width, work.width, work.keys, shape.head_dim, work.scores);
    for (int r = 0; r < kCount; ++r) {
        float* scores = work.scores + r * kBlock;
        weigh(scores, lanes_of(r), map, factors, work.sums, row + r);
        if (factors == nullptr) continue;
        for (long i = lanes.begin; i < lanes.end; ++i) scores[i] *= factors[kBlock + i];
    }
    add_values<kCount>(work, values, lanes, row);
}

template <bool kPairs, int kCount = kTile, class Values>
void add_some_rows(long count, const AttentionShape& shape, ScoreMap map, const float* factors, const Walk& walk,
                   long first, long first_of_head, long row, const Work& work, const Values& values) {
    if constexpr (kCount > 1) {
        if (count < kCount) {
            return add_some_rows<kPairs, kCount - 1>(count, shape, map, factors, walk, first, first_of_head, row, work,
                                             values);
        }
    }
    add_rows<kCount, kPairs>(shape, map, factors, walk, first, first_of_head, row, work, values);
}

template <class T, class E>
void attend(const AttentionCall<T, E>& call, const Walk& walk, const Walk& next_walk, const Partials& partials) {
    const AttentionShape& shape = call.shape;
    const long head_rows = walk.num_queries * shape.group();
    const Work work(shape, walk.num_heads * head_rows);
    for_each_row(shape, walk, head_rows, [&](long row, const Query& query, long q_head) {
        const T* from = call.q + query.token * call.ldq + q_head * shape.head_dim;
        keep_query<kInPairs<T, E>>(from, shape.head_dim, work.q + row * work.width);
    });
    const float* factors = call.k_cache.factors == nullptr ? nullptr : work.factors;
    const bool widened = head_rows > kTile || shape.v_dim % 32 != 0;
    Block block(shape, walk, walk.begin * kBlock);
    add_segments(shape, walk, partials, head_rows, work.sums, work.total, [&](long at) {
        const bool last = at + 1 >= walk.end;
        const Walk& then = last ? next_walk : walk;
        const Block next(shape, then, (last ? next_walk.begin : at + 1) * kBlock);
        Prefetch<T, E> prefetch(call, then, next);
        for (long h = 0; h < walk.num_heads; ++h) {
            const long kv_head = walk.first_head + h;
            read_head(call, block, kv_head, work, prefetch, kBlock / walk.num_heads + 1, widened);
            const auto add = [&](const auto& values) {
                for (long r = 0; r < head_rows; r += kTile) {
                    add_some_rows<kInPairs<T, E>>(std::min<long>(kTile, head_rows - r), shape, call.map, factors, walk, at * kBlock,
                                  r, h * head_rows + r, work, values);
                }
            };
            if (widened) {
                add(WidenedValues{work.values, work.sums.v_width});
            } else {
                add(KeptValues<E>{call.v_cache, block.slots, kv_head});
            }
        }
        block = next;
    });
    if (walk.finishes) finish_rows(call, walk, head_rows, work.total);
}

}  // namespace

FOREBAY_ATTENTION(float, float, f32_f32, attend)
FOREBAY_ATTENTION(float, bf16, f32_bf16, attend)
FOREBAY_ATTENTION(float, int8_t, f32_i8, attend)
#if !defined(FOREBAY_AMX)  // attention_amx.cpp has these
FOREBAY_ATTENTION(bf16, bf16, bf16_bf16, attend)
FOREBAY_ATTENTION(bf16, int8_t, bf16_i8, attend)
#endif

// Which tokens a query of sparse attention reads: an indexer scores all that it sees, and the best are chosen
// (DeepSeek-V3.2-Exp, section 2.1, "lightning indexer").
//
// A query's score of a key is the sum over the indexer's heads, in their order, of weight * max(0, q . k): a lane's sums,
// which depend on nobody else. Queries of one sequence share the turned keys of a block. Scores are kept for some queries
// at a time, so their memory does not grow with the prompt.
#include <cmath>
#include <memory>
#include <vector>

#include "rows.h"
#include "turned_keys.h"

namespace {

constexpr long kQueries = 8;             // of one sequence, that read a block together
constexpr long kRoundScores = 2L << 20;  // scored before any of them are chosen

template <class T, class E>
struct IndexCall {
    AttentionShape shape;  // q_heads and head_dim are the indexer's
    const T* q;            // [T, q_heads, head_dim]
    const float* weights;  // [T, q_heads], or [q_heads] for all tokens
    long weights_row;      // entries from one token to the next
    Cache<E> keys;
    long most;           // of a row of `positions`
    int32_t* positions;  // [T, most]
    int32_t* counts;     // [T]
};

// Successive queries of a sequence.
struct Chunk {
    long seq;
    long token;
    long count;
    long position;  // of the first
    float* scores;  // [count][width]
    long width;

    long newest_position() const { return position + count - 1; }
};

// The blocks begin..end of a chunk's keys.
struct Segment {
    const Chunk* chunk;
    long begin;
    long end;
};

std::vector<Chunk> chunks_of(const AttentionShape& shape) {
    std::vector<Chunk> chunks;
    for (long s = 0; s < shape.num_seqs; ++s) {
        const long begin = shape.q_start[s], end = shape.q_start[s + 1];
        for (long t = begin; t < end; t += kQueries) {
            const long count = std::min(kQueries, end - t), position = shape.seq_lens[s] - (end - t);
            chunks.push_back({s, t, count, position, nullptr, round_up(position + count, kBlock)});
        }
    }
    return chunks;
}

// The slots of `count` positions from `first` on.
void find_slots(const AttentionShape& shape, long seq, long first, long count, long* slots) {
    const int32_t* page = shape.pages_of(seq) + first / shape.page_size;
    long in_page = first % shape.page_size;
    for (long i = 0; i < count; ++page, in_page = 0) {
        const long cache_page = shape.page_map == nullptr ? *page : shape.page_map[*page];
        long slot = cache_page * shape.page_size + in_page;
        for (const long stop = std::min(count, i + shape.page_size - in_page); i < stop; ++i) slots[i] = slot++;
    }
}

// total [kBlock] += weights[h] * max(0, q[h] . k) for heads h of `count`, which are `width` apart.
template <int kCount>
void add_heads(const float* q, long width, const float* keys, long head_dim, const float* factors,
               const float* weights, float* scores, float* total) {
    score_rows<kCount>(q, width, keys, head_dim, scores);
    for (long i = 0; i < kBlock; i += W) {
        Vec sum = load(total + i);
        for (int h = 0; h < kCount; ++h) {
            Vec score = load(scores + h * kBlock + i);
            if (factors != nullptr) score = score * load(factors + i);
            sum = fma(set1(weights[h]), max(zero(), score), sum);  // max returns its second operand, a NaN
        }
        store(total + i, sum);
    }
}

template <int kCount = kTile>
void add_some_heads(long count, const float* q, long width, const float* keys, long head_dim, const float* factors,
                    const float* weights, float* scores, float* total) {
    if constexpr (kCount > 1) {
        if (count < kCount) {
            return add_some_heads<kCount - 1>(count, q, width, keys, head_dim, factors, weights, scores, total);
        }
    }
    add_heads<kCount>(q, width, keys, head_dim, factors, weights, scores, total);
}

template <class T, class E>
void score_segment(const IndexCall<T, E>& call, const Segment& segment) {
    const AttentionShape& shape = call.shape;
    const Chunk& chunk = *segment.chunk;
    const long heads = shape.q_heads, dim = shape.head_dim, width = round_up(dim, 16);
    const long floats = chunk.count * heads * width + kBlock * (width + kTile + 1);
    float* q = static_cast<float*>(thread_scratch(floats * sizeof(float)));
    float* keys = q + chunk.count * heads * width;
    float* scores = keys + width * kBlock;
    float* factors = scores + kTile * kBlock;
    for (long row = 0; row < chunk.count * heads; ++row) {
        const T* from = call.q + (chunk.token * heads + row) * dim;
        for_each_vector(dim, [&](long i, long part) { store(q + row * width + i, load_part(from + i, part)); });
    }
    long slots[kBlock];
    for (long block = segment.begin; block < segment.end; ++block) {
        const long first = block * kBlock, seen = std::min(kBlock, chunk.newest_position() + 1 - first);
        find_slots(shape, chunk.seq, first, seen, slots);
        for (long lane = 0; lane < seen; lane += W) {
            turn_keys(call.keys, slots, {0, seen}, lane, 0, dim, keys);
        }
        const bool in_codes = call.keys.factors != nullptr;
        if (in_codes) {
            std::fill_n(factors, kBlock, 0.0f);
            for (long i = 0; i < seen; ++i) factors[i] = call.keys.factor(slots[i], 0);
        }
        for (long i = 0; i < chunk.count; ++i) {
            if (chunk.position + i < first) continue;
            float* total = chunk.scores + i * chunk.width + first;
            std::fill_n(total, kBlock, 0.0f);
            for (long h = 0; h < heads; h += kTile) {
                add_some_heads(std::min<long>(kTile, heads - h), q + (i * heads + h) * width, width, keys, dim,
                               in_codes ? factors : nullptr,
                               call.weights + (chunk.token + i) * call.weights_row + h, scores, total);
            }
        }
    }
}

// Whether the key of a position is a number: all of one that is not is NaN, or its factor.
template <class T, class E>
bool has_key(const IndexCall<T, E>& call, const Chunk& chunk, long position) {
    long slot;
    find_slots(call.shape, chunk.seq, position, 1, &slot);
    if (call.keys.factors != nullptr) return !std::isnan(call.keys.factor(slot, 0));
    return is_finite(call.keys.head(slot, 0), 1);
}

// The best of the scores that a query has for itself and all before it, of equal ones the earlier; ascending. A NaN
// counts as infinity, so that what it is the score of is read.
template <class T, class E>
void choose(const IndexCall<T, E>& call, const Chunk& chunk, long query) {
    constexpr float kInf = std::numeric_limits<float>::infinity();
    const long token = chunk.token + query, num_seen = chunk.position + query + 1;
    const float* scores = chunk.scores + query * chunk.width;
    int32_t* positions = call.positions + token * call.most;
    const bool fails = num_seen == 0 || !has_key(call, chunk, num_seen - 1) || (num_seen > call.most && std::isnan(scores[num_seen - 1]));
    const long count = fails ? 0 : std::min(num_seen, call.most);
    call.counts[token] = static_cast<int32_t>(count);
    std::fill(positions + count, positions + call.most, -1);
    if (count == num_seen || count == 0) {
        for (long i = 0; i < count; ++i) positions[i] = static_cast<int32_t>(i);
        return;
    }
    float* sorted = static_cast<float*>(thread_scratch(num_seen * sizeof(float)));
    const auto rank = [&](float score) { return std::isnan(score) ? kInf : score; };
    std::transform(scores, scores + num_seen, sorted, rank);
    std::nth_element(sorted, sorted + count - 1, sorted + num_seen, std::greater<float>());
    const float least = sorted[count - 1];
    long equal = count - std::count_if(sorted, sorted + count, [&](float score) { return score > least; });
    for (long i = 0; i < num_seen; ++i) {
        const float score = rank(scores[i]);
        if (score < least || (score == least && --equal < 0)) continue;
        *positions++ = static_cast<int32_t>(i);
    }
}

// The chunks begin..end: all scores, then all choices.
template <class T, class E>
void select_round(Pool& pool, const IndexCall<T, E>& call, Chunk* begin, const Chunk* end, float* scores) {
    std::vector<Segment> segments;
    std::vector<const Chunk*> by_query;
    for (Chunk* chunk = begin; chunk != end; ++chunk) {
        chunk->scores = scores;
        scores += chunk->count * chunk->width;
        by_query.insert(by_query.end(), chunk->count, chunk);
        if (chunk->newest_position() < call.most) continue;  // all that they see is chosen
        const long blocks = chunk->width / kBlock;
        for (long b = 0; b < blocks; b += kSegmentBlocks) {
            segments.push_back({chunk, b, std::min(blocks, b + kSegmentBlocks)});
        }
    }
    pool.run(static_cast<long>(segments.size()), 1, [&](long first, long last) {
        for (long i = first; i < last; ++i) score_segment(call, segments[i]);
    });
    pool.run(static_cast<long>(by_query.size()), 1, [&](long first, long last) {
        for (long i = first; i < last; ++i) {
            choose(call, *by_query[i], begin->token + i - by_query[i]->token);
        }
    });
}

template <class T, class E>
void select_tokens(Pool& pool, const IndexCall<T, E>& call) {
    std::vector<Chunk> chunks = chunks_of(call.shape);
    Chunk* const end = chunks.data() + chunks.size();
    std::unique_ptr<float[]> scores;
    long room = 0;
    for (Chunk *begin = chunks.data(), *stop = begin; begin != end; begin = stop) {
        long floats = 0;
        do {
            floats += stop->count * stop->width;
            ++stop;
        } while (stop != end && floats + stop->count * stop->width <= kRoundScores);
        if (floats > room) scores.reset(new float[room = floats]);
        select_round(pool, call, begin, stop, scores.get());
    }
}

}  // namespace

#define FOREBAY_SELECTION(T, E, suffix)                                                                             \
    extern "C" void fb_select_tokens_##suffix(                                                                      \
        Pool* pool, const T* q, const float* weights, long weights_row, const E* keys, long slot,                   \
        const float* factors,                                                                                       \
        const int32_t* page_table, long pages_per_row, const int32_t* page_map, const int32_t* rows,                \
        const int32_t* q_start, const int32_t* seq_lens, long num_seqs, long page_size, long heads, long head_dim,  \
        long most, int32_t* positions, int32_t* counts) {                                                           \
        const AttentionShape shape{page_table, pages_per_row, page_map, rows,     q_start, seq_lens, num_seqs,      \
                                   page_size,  heads,         1,        head_dim, 0,       0};                      \
        const IndexCall<T, E> call{shape, q, weights, weights_row, {keys, slot, head_dim, factors, 1},              \
                                   most,  positions, counts};                                                       \
        pool->op([call](Pool& p) { select_tokens(p, call); });                                                      \
    }

FOREBAY_SELECTION(float, float, f32_f32)
FOREBAY_SELECTION(float, bf16, f32_bf16)
FOREBAY_SELECTION(float, int8_t, f32_i8)
FOREBAY_SELECTION(bf16, bf16, bf16_bf16)
FOREBAY_SELECTION(bf16, int8_t, bf16_i8)

// The tokens of selected blocks of `rate` tokens and, behind them, those of the open block: tokens [T, most * rate +
// rate - 1], -1 behind them, and totals [T]. A query with whole blocks of which it selected none selects nothing.
extern "C" void fb_block_tokens(Pool* pool, const int32_t* blocks, const int32_t* counts, const int64_t* positions,
                                const int32_t* q_start, const int32_t* seq_lens, long num_seqs, long most, long rate,
                                int32_t* tokens, int32_t* totals) {
    pool->op([=](Pool& p) {
        const long width = most * rate + rate - 1;
        p.run(q_start[num_seqs], grain_for(4 * width), [=](long begin, long end) {
            for (long t = begin; t < end; ++t) {
                const long seq = std::upper_bound(q_start, q_start + num_seqs, t) - q_start - 1;
                const long ends = positions[t] + 1, whole = counts[t] * rate, open = ends % rate;
                const bool selects = seq_lens[seq] > 0 && (whole > 0 || ends < rate);
                const long total = selects ? whole + open : 0;
                int32_t* const out = tokens + t * width;
                for (long i = 0; i < width; ++i) {
                    const long at = i < whole ? blocks[t * most + i / rate] * rate + i % rate : ends - open - whole + i;
                    out[i] = i < total ? static_cast<int32_t>(at) : -1;
                }
                totals[t] = static_cast<int32_t>(total);
            }
        });
    });
}

// The tokens' selections as page tables of a page for each position, locations [T, most], 0 for -1, and the tokens as
// sequences of one query each: rows [T], q_start [T + 1].
extern "C" void fb_token_pages(Pool* pool, const int32_t* positions, int32_t* locations, int32_t* token_rows,
                               int32_t* token_start, const int32_t* page_table, long pages_per_row,
                               const int32_t* page_map, const int32_t* rows, const int32_t* q_start, long num_seqs,
                               long page_size, long most) {
    pool->op([=](Pool& p) {
        const uint32_t size = static_cast<uint32_t>(page_size);
        p.run(q_start[num_seqs], grain_for(4 * most), [=](long begin, long end) {
            for (long t = begin; t < end; ++t) {
                // The last sequence that begins no later: those before it that begin there have no queries.
                const long seq = std::upper_bound(q_start, q_start + num_seqs, t) - q_start - 1;
                const int32_t* pages = page_table + rows[seq] * pages_per_row;
                token_rows[t] = token_start[t] = static_cast<int32_t>(t);
                for (long i = t * most; i < (t + 1) * most; ++i) {
                    const uint32_t at = static_cast<uint32_t>(std::max(0, positions[i]));
                    int32_t page = pages[at / size];
                    if (page_map != nullptr) page = page_map[page];
                    locations[i] = positions[i] < 0 ? 0 : page * static_cast<int32_t>(size) + static_cast<int32_t>(at % size);
                }
            }
        });
        token_start[q_start[num_seqs]] = q_start[num_seqs];
    });
}

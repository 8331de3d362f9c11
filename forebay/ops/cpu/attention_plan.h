// Who reads which keys: a call of attention as walks, which threads take one by one.
//
// A walk is a range of key blocks for some queries that all see what is in it, but for their ends. A piece of a
// sequence's queries usually has one walk, over all its keys and all or one of its heads. There are two reasons for
// more:
// - Sequences that decode over the same pages (a shared prefix) have these read once: one walk for the queries of all.
// - Where there are fewer pieces than threads want, a long sequence's segments are walks of their own.
// Such a walk leaves each query's sums of a segment in `Partials`; a later phase's walk goes on from there, and the
// last one of a query adds the segments up. Whatever the plan, each query adds the same numbers in the same order.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "pool.h"

constexpr long kBlock = 64;         // key positions
constexpr long kSegmentBlocks = 8;  // of a segment
constexpr long kSegment = kSegmentBlocks * kBlock;
constexpr long kWeightLanes = 16;  // at most, in which a row's weights are summed
constexpr long kRows =
    64;  // query rows (queries x the heads of their group) of a walk and KV head, unless one has more

struct AttentionShape {
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
    long window;  // 0: none

    long group() const { return q_heads / kv_heads; }
    const int32_t* pages_of(long seq) const { return page_table + rows[seq] * pages_per_row; }
};

struct Query {
    long token;
    long position;
};

struct Walk {
    const Query* queries;
    long num_queries;
    long newest_position;  // of the queries; further keys are not read
    long seq;              // whose pages are read
    long first_head;
    long num_heads;
    long begin;  // blocks
    long end;
    bool resumes;     // the segment of `begin` has been begun: its sums are in the partials
    bool finishes;    // adds up the segments and writes the results; otherwise it leaves its segment in the partials
    long first_done;  // segments first_done..end_done come before those of the walk; they are in the partials
    long end_done;
};

// Each query row's sums of each segment, for the tokens of walks that do not do all by themselves.
class Partials {
  public:
    explicit Partials(const AttentionShape& shape);

    // Token `token` will have partials of the segments up to that of `position`.
    void add(long token, long position);
    void allocate();
    float* at(long token, long q_head, long segment) const {
        const Place& place = places_[token];
        return memory_.get() + place.first + (q_head * place.num_segments + segment) * row_floats_;
    }

  private:
    struct Place {
        long first;
        long num_segments;
    };
    std::vector<Place> places_;
    std::unique_ptr<float[]> memory_;
    long q_heads_;
    long row_floats_;
    long total_ = 0;
};

struct Plan {
    std::vector<Query> queries;               // of all sequences
    std::vector<std::vector<Query>> sharing;  // queries of different sequences that walk together
    std::vector<std::vector<Walk>> phases;    // the walks of a phase may run at once, and after those of the one before
    Partials partials;
};

Plan make_plan(const AttentionShape& shape, int num_threads);

// Calls walk(now, next, partials) for all walks; `next` is the one that this thread most likely takes next.
template <class Visit>
void run_plan(Pool& pool, const AttentionShape& shape, const Visit& walk) {
    const Plan plan = make_plan(shape, pool.num_threads());
    for (const std::vector<Walk>& walks : plan.phases) {
        const long count = static_cast<long>(walks.size());
        pool.run(count, [&](long begin, long end) {
            for (long i = begin; i < end; ++i) walk(walks[i], walks[std::min(i + 1, count - 1)], plan.partials);
        });
    }
}

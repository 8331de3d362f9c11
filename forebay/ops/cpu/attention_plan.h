// Who reads which keys: attention as walks, which threads take one by one. All layers that find their KV by the same page
// table and have heads of the same shape share a plan.
//
// A walk is a range of key blocks for some queries that all see what is in it, but for their ends. A piece of a
// sequence's queries usually has one walk, over all its keys and all or one of its heads. There are two reasons for
// more:
// - Sequences that decode over the same pages (a shared prefix) have these read once: one walk for the queries of all.
// - Where there are fewer pieces than threads want, a long sequence's segments are walks of their own.
// Such a walk leaves each query's sums of a segment in `Partials`; a later phase's walk goes on from there, and the
// last one of a query adds the segments up. Whatever the plan, each query adds the same numbers in the same order.
//
// Three sequences, of which a and b begin alike, as few as threads; `|` ends a segment, a block's digit is its phase:
//
//     a  00000000|00111111|11111   then phase 2 adds up a's segments
//     b  00000000|00111            whose last walk adds up, too; what a and b have in common is read by one walk
//     c  00000000|00000000|00000   then phase 1 adds up c's
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "pool.h"

constexpr long kBlock = 64;         // key positions
constexpr long kSegmentBlocks = 8;  // of a segment
constexpr long kSegment = kSegmentBlocks * kBlock;
constexpr long kWeightLanes = 16;  // at most, in which a row's weights are summed
constexpr long kRows = 64;  // query rows (queries x heads of a group) of a walk and KV head, unless one has more

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
    long last;  // position that it sees; of a sequence's queries none sees further than the next
};

struct Walk {
    const Query* queries;
    long num_queries;
    long newest_position;  // that a query sees; further keys are not read
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

// Where each query row's sums of each segment lie, for the tokens of walks that do not do all by themselves.
class PartialPlaces {
  public:
    PartialPlaces() = default;
    explicit PartialPlaces(const AttentionShape& shape);

    // Token `token` will have partials of the segments up to that of `position`.
    void add(long token, long position);
    long num_floats() const { return num_floats_; }
    long at(long token, long q_head, long segment) const {
        const Place& place = places_[token];
        return place.first + (q_head * place.num_segments + segment) * row_floats_;
    }

  private:
    struct Place {
        long first;
        long num_segments;
    };
    std::vector<Place> places_;
    long q_heads_ = 0;
    long row_floats_ = 0;
    long num_floats_ = 0;
};

// The sums themselves, of one layer.
struct Partials {
    const PartialPlaces& places;
    float* memory;

    float* at(long token, long q_head, long segment) const { return memory + places.at(token, q_head, segment); }
};

struct Plan {
    AttentionShape shape{};
    std::vector<Query> queries;               // of all sequences
    std::vector<std::vector<Query>> sharing;  // queries of different sequences that walk together
    std::vector<std::vector<Walk>> phases;    // the walks of a phase may run at once, and after those of the one before
    PartialPlaces partials;
};

// Made once a step, and anew by each replay of it; the recordings of its layers keep it.
using SharedPlan = std::shared_ptr<Plan>;

// Calls walk(now, next, partials) for all walks; `next` is the one that this thread most likely takes next.
template <class Visit>
void run_plan(Pool& pool, const Plan& plan, const Visit& walk) {
    const std::unique_ptr<float[]> memory(new float[plan.partials.num_floats()]);
    const Partials partials{plan.partials, memory.get()};
    for (const std::vector<Walk>& walks : plan.phases) {
        const long count = static_cast<long>(walks.size());
        pool.run(count, [&](long begin, long end) {
            for (long i = begin; i < end; ++i) walk(walks[i], walks[std::min(i + 1, count - 1)], partials);
        });
    }
}

#include "attention_plan.h"

#include <algorithm>

namespace {

// Reading a block once instead of twice must pay for another phase and for two passes over the sums.
constexpr long kWorthSharing = 4;  // blocks that need not be read

long segments(long blocks) { return (blocks + kSegmentBlocks - 1) / kSegmentBlocks; }

// A sequence that decodes: its one query, and the blocks that it sees whole.
struct Decoding {
    long seq;
    long query;  // in Plan::queries
    long whole_blocks;
    long shared = 0;  // blocks that shared walks have added up
    long depth = 0;   // phases that these take
};

class Planner {
  public:
    // `causal`: a query sees the keys up to its own, and with `ahead` as many behind it; else all of its sequence's.
    Planner(const AttentionShape& shape, int num_threads, bool may_share, bool causal, const int32_t* ahead)
        : shape_(shape),
          num_threads_(num_threads),
          may_share_(may_share),
          causal_(causal),
          ahead_(ahead),
          plan_{shape, {}, {}, {}, PartialPlaces(shape)} {}

    Plan make() {
        find_queries();
        share_prefixes();
        cut_sequences();
        return std::move(plan_);
    }

  private:
    void find_queries() {
        const long tokens = shape_.q_start[shape_.num_seqs];
        plan_.queries.reserve(tokens);
        for (long s = 0; s < shape_.num_seqs; ++s) {
            const long begin = shape_.q_start[s], end = shape_.q_start[s + 1];
            for (long t = begin; t < end; ++t) {
                const long position = shape_.seq_lens[s] - (causal_ ? end - t : 1);
                plan_.queries.push_back({t, position, position + (ahead_ == nullptr ? 0 : ahead_[t])});
            }
        }
    }

    // -- shared prefixes ----------------------------------------------------------------------------------------------

    void share_prefixes() {
        decoding_.resize(shape_.num_seqs, -1);
        // With so many heads that a walk has one query, nothing would be read once for several.
        if (!may_share_ || shape_.window > 0 || kRows / shape_.group() < 2) return;
        std::vector<Decoding*> members;
        sequences_.reserve(shape_.num_seqs);
        for (long s = 0; s < shape_.num_seqs; ++s) {
            if (shape_.q_start[s + 1] - shape_.q_start[s] != 1 || shape_.seq_lens[s] < kBlock) continue;
            decoding_[s] = static_cast<long>(sequences_.size());
            sequences_.push_back({s, shape_.q_start[s], shape_.seq_lens[s] / kBlock});
        }
        for (Decoding& sequence : sequences_) members.push_back(&sequence);
        share(members, 0, 0);
    }

    int32_t first_page(const Decoding& d, long block) const {
        return shape_.pages_of(d.seq)[block * kBlock / shape_.page_size];
    }

    // The number of blocks whose pages are the same for both.
    long common_blocks(const Decoding& a, const Decoding& b) const {
        const long most = std::min(a.whole_blocks, b.whole_blocks);
        const long pages = most * kBlock / shape_.page_size;  // a page that is cut counts as another
        const int32_t* x = shape_.pages_of(a.seq);
        const int32_t* y = shape_.pages_of(b.seq);
        return (std::mismatch(x, x + pages, y).first - x) * shape_.page_size / kBlock;
    }

    // All members have the blocks before `block` in common. Finds those that have more, and so on.
    void share(std::vector<Decoding*> members, long block, long depth) {
        std::erase_if(members, [&](const Decoding* d) { return d->whole_blocks <= block; });
        std::stable_sort(members.begin(), members.end(), [&](const Decoding* a, const Decoding* b) {
            return first_page(*a, block) < first_page(*b, block);
        });
        for (auto first = members.begin(); first != members.end();) {
            const int32_t page = first_page(**first, block);
            auto last = std::find_if(first, members.end(), [&](Decoding* d) { return first_page(*d, block) != page; });
            share_run({first, last}, block, depth);
            first = last;
        }
    }

    // Members whose next page is the same.
    void share_run(const std::vector<Decoding*>& members, long block, long depth) {
        const long count = static_cast<long>(members.size());
        if (count < 2) return;
        long end = members[0]->whole_blocks;
        for (const Decoding* d : members) end = std::min(end, common_blocks(*members[0], *d));
        if ((end - block) * (count - 1) < kWorthSharing) return;
        for (Decoding* d : members) {
            d->shared = end;
            d->depth = depth + 1;
        }
        add_shared_walks(members, block, end, depth);
        share(members, end, depth + 1);
    }

    void add_shared_walks(const std::vector<Decoding*>& members, long block, long end, long depth) {
        const long most = std::max(1L, kRows / shape_.group());
        std::vector<Query> list;
        list.reserve(members.size());
        for (const Decoding* d : members) list.push_back(plan_.queries[d->query]);
        for (long begin = block; begin < end;) {
            const long stop = std::min(end, (begin / kSegmentBlocks + 1) * kSegmentBlocks);
            for (long q = 0; q < static_cast<long>(list.size()); q += most) {
                Walk walk{};
                walk.queries = &list[q];
                walk.num_queries = std::min(most, static_cast<long>(list.size()) - q);
                walk.newest_position = stop * kBlock - 1;
                walk.seq = members[0]->seq;
                walk.begin = begin;
                walk.end = stop;
                walk.resumes = begin % kSegmentBlocks != 0;
                add(walk, depth, 1);
            }
            begin = stop;
        }
        plan_.sharing.push_back(std::move(list));  // its memory stays where it is
    }

    // -- each sequence's own keys -------------------------------------------------------------------------------------

    void cut_sequences() {
        const long most = std::max(1L, kRows / shape_.group());
        std::vector<Walk> pieces;
        std::vector<long> depths;
        for (long s = 0; s < shape_.num_seqs; ++s) {
            const long begin = shape_.q_start[s], end = shape_.q_start[s + 1];
            const Decoding* shared = decoding_[s] < 0 ? nullptr : &sequences_[decoding_[s]];
            for (long t = begin; t < end; t += most) {
                Walk walk{};
                walk.queries = &plan_.queries[t];
                walk.num_queries = std::min(most, end - t);
                walk.newest_position = walk.queries[walk.num_queries - 1].last;
                walk.seq = s;
                walk.begin = shared == nullptr ? first_block(walk) : shared->shared;
                walk.end = walk.newest_position / kBlock + 1;
                walk.finishes = true;
                if (shared != nullptr && walk.begin < walk.end) {
                    walk.resumes = walk.begin % kSegmentBlocks != 0;
                    walk.end_done = walk.begin / kSegmentBlocks;
                } else if (shared != nullptr) {
                    walk.end_done = segments(walk.end);
                }
                pieces.push_back(walk);
                depths.push_back(shared == nullptr ? 0 : shared->depth);
            }
        }
        const long count = static_cast<long>(pieces.size());
        const bool many = count >= 4 * num_threads_;
        for (long i = 0; i < count; ++i) {
            const Walk& piece = pieces[i];
            if (depths[i] > 0) add_partials(piece);
            if (!many && piece.begin / kSegmentBlocks < (piece.end - 1) / kSegmentBlocks) {
                split(piece, depths[i]);
                continue;
            }
            // A token's heads lie side by side in the caches: a small walk (decoding) takes all, and so reads whole
            // lines of the caches in order.
            const bool small = piece.num_queries * shape_.q_heads <= kRows;
            add(piece, depths[i], many && small ? shape_.kv_heads : 1);
        }
    }

    // The block in which the piece's oldest query sees its first key.
    long first_block(const Walk& walk) const {
        return shape_.window > 0 ? std::max(0L, walk.queries[0].position - shape_.window + 1) / kBlock : 0;
    }

    void split(const Walk& piece, long depth) {
        add_partials(piece);
        Walk part = piece;
        part.finishes = false;
        for (long begin = piece.begin; begin < piece.end; begin = part.end) {
            part.begin = begin;
            part.end = std::min(piece.end, (begin / kSegmentBlocks + 1) * kSegmentBlocks);
            part.resumes = begin == piece.begin && piece.resumes;
            add(part, depth, 1);
        }
        Walk last = piece;
        last.begin = last.end;
        last.resumes = false;
        last.first_done = depth > 0 ? 0 : piece.begin / kSegmentBlocks;
        last.end_done = segments(last.end);
        add(last, depth + 1, 1);
    }

    void add_partials(const Walk& walk) {
        for (long i = 0; i < walk.num_queries; ++i) {
            plan_.partials.add(walk.queries[i].token, walk.newest_position);
        }
    }

    void add(Walk walk, long phase, long heads) {
        if (static_cast<long>(plan_.phases.size()) <= phase) plan_.phases.resize(phase + 1);
        walk.num_heads = heads;
        for (long head = 0; head < shape_.kv_heads; head += heads) {
            walk.first_head = head;
            plan_.phases[phase].push_back(walk);
        }
    }

    const AttentionShape& shape_;
    const long num_threads_;
    const bool may_share_;
    const bool causal_;
    const int32_t* const ahead_;
    Plan plan_;
    std::vector<Decoding> sequences_;
    std::vector<long> decoding_;  // by sequence: which of sequences_, or -1
};

}  // namespace

PartialPlaces::PartialPlaces(const AttentionShape& shape)
    : places_(shape.q_start[shape.num_seqs]),
      q_heads_(shape.q_heads),
      row_floats_((shape.v_dim + 31) / 32 * 32 + 2 * kWeightLanes) {}

void PartialPlaces::add(long token, long position) {
    Place& place = places_[token];
    if (place.num_segments > 0) return;
    place = {num_floats_, position / kSegment + 1};
    num_floats_ += q_heads_ * place.num_segments * row_floats_;
}

extern "C" {

SharedPlan* fb_attention_plan_create() { return new SharedPlan(new Plan); }

void fb_attention_plan_destroy(SharedPlan* plan) { delete plan; }

// Every seq_lens[i] is at least its number of queries, or 0, and the pages of the positions that a query sees are the
// caches'. Without `may_share` no pages are looked at for what sequences have in common. If not `causal`, queries see all
// keys of their sequences; `ahead` [tokens], which may be null, are the keys behind its own that a query sees.
void fb_attention_plan_make(Pool* pool, const SharedPlan* shared, const int32_t* page_table, long pages_per_row,
                            const int32_t* page_map, const int32_t* rows, const int32_t* q_start,
                            const int32_t* seq_lens, long num_seqs, long page_size, long q_heads, long kv_heads,
                            long head_dim, long v_dim, long window, long may_share, long causal,
                            const int32_t* ahead) {
    const AttentionShape shape{page_table, pages_per_row, page_map, rows,     q_start, seq_lens, num_seqs,
                               page_size,  q_heads,       kv_heads, head_dim, v_dim,   window};
    pool->op([=, plan = *shared](Pool& p) {
        *plan = Planner(shape, p.num_threads(), may_share != 0, causal != 0, ahead).make();
    });
}
}

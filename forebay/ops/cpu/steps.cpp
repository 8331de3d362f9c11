// What surrounds the model: where a step's tokens stand, what they are, and how far their rows have come. A loop over a
// step's tokens each, of a few nanoseconds: no threads.
#include <algorithm>
#include <cstdint>

#include "pool.h"

extern "C" {

// out[i] = table[rows[i]]
void fb_gather(Pool* pool, const int64_t* table, const int32_t* rows, int64_t* out, long count) {
    pool->op([=](Pool&) {
        for (long i = 0; i < count; ++i) out[i] = table[rows[i]];
    });
}

// table[rows[i]] = values[i]; of a row that is named twice (padding) either value may stay.
void fb_scatter(Pool* pool, int64_t* table, const int32_t* rows, const int64_t* values, long count) {
    pool->op([=](Pool&) {
        for (long i = 0; i < count; ++i) table[rows[i]] = values[i];
    });
}

// See `StepOps.of_tokens`.
void fb_of_tokens(Pool* pool, const int32_t* table, const int32_t* rows, const int32_t* q_start, int32_t* out,
                  long num_seqs) {
    pool->op([=](Pool&) {
        for (long i = 0; i < num_seqs; ++i) std::fill(out + q_start[i], out + q_start[i + 1], table[rows[i]]);
    });
}

// See `StepOps.rope_positions`; `given` may be null.
void fb_rope_positions(Pool* pool, const int64_t* positions, const int64_t* given, const int32_t* rows,
                       const int32_t* q_start, const int64_t* deltas, int64_t* out, long num_seqs, long tokens) {
    pool->op([=](Pool&) {
        for (long i = 0; i < num_seqs; ++i) {
            for (long t = q_start[i]; t < q_start[i + 1]; ++t) {
                const int64_t position = std::max<int64_t>(positions[t] + deltas[rows[i]], 0);
                for (long axis = 0; axis < 3; ++axis) {
                    const int64_t own = given == nullptr ? -1 : given[3 * t + axis];
                    out[axis * tokens + t] = own < 0 ? position : own;
                }
            }
        }
    });
}

// See `StepOps.place_tokens`.
void fb_place_tokens(Pool* pool, const int32_t* rows, const int32_t* q_start, const int64_t* kv_lens,
                     const int32_t* page_table, long pages_per_row, long page_size, int64_t* positions,
                     int32_t* seq_lens, int64_t* locs, long num_seqs) {
    pool->op([=](Pool&) {
        const int64_t end = pages_per_row * page_size;
        for (long i = 0; i < num_seqs; ++i) {
            const long row = rows[i], count = q_start[i + 1] - q_start[i];
            const int32_t* pages = page_table + row * pages_per_row;
            const int64_t start = row == 0 ? 0 : std::clamp<int64_t>(kv_lens[row], 0, end);
            seq_lens[i] = static_cast<int32_t>(std::min(start + count, end));
            for (long j = 0; j < count; ++j) {
                const int64_t position = row == 0 ? 0 : start + j, inside = position % page_size;
                const int32_t page = row == 0 || position >= end ? 0 : pages[position / page_size];
                const long t = q_start[i] + j;
                positions[t] = std::min(position, end - 1);
                locs[t] = page * page_size + inside;
            }
        }
    });
}

// See `StepOps.map_locations`.
void fb_map_locations(Pool* pool, const int64_t* loc, const int32_t* page_map, long page_size, int64_t* out,
                      long count) {
    pool->op([=](Pool&) {
        for (long t = 0; t < count; ++t) {
            const int64_t page = loc[t] / page_size, mapped = page == 0 ? 0 : page_map[page];
            out[t] = mapped * page_size + loc[t] % page_size;
        }
    });
}

// See `StepOps.due`.
void fb_due(Pool* pool, const int32_t* slots, const int32_t* ends, const int64_t* lens, const int64_t* positions,
            int32_t* out, long count) {
    pool->op([=](Pool&) {
        for (long i = 0; i < count; ++i) {
            const bool due = ends[i] > 0 && positions[ends[i] - 1] + 1 == lens[i];
            out[i] = due ? slots[i] : 0;
        }
    });
}

// See `StepOps.accepted_stops`.
void fb_accepted_stops(Pool* pool, const int32_t* q_start, const int64_t* num_new, const int64_t* positions,
                       const int32_t* written, const int64_t* wish_lens, const int32_t* wish_slots, int32_t* stops,
                       int32_t* ends, int32_t* slots, long num_seqs) {
    pool->op([=](Pool&) {
        for (long i = 0; i < num_seqs; ++i) {
            const int32_t first = q_start[i];
            const int64_t wished = first == q_start[i + 1] ? 0 : wish_lens[i] - positions[first];
            stops[i] = first + (written[i] == 0 ? static_cast<int32_t>(num_new[i]) : 0);
            ends[i] = first + static_cast<int32_t>(wished);
            slots[i] = wished > 0 && wished <= num_new[i] ? wish_slots[i] : 0;
        }
    });
}

// kv_lens[rows[i]] += the number of its tokens.
void fb_advance(Pool* pool, int64_t* kv_lens, const int32_t* rows, const int32_t* q_start, long num_seqs) {
    pool->op([=](Pool&) {
        for (long i = 0; i < num_seqs; ++i) kv_lens[rows[i]] += q_start[i + 1] - q_start[i];
    });
}

// See `StepOps.decode_ids`; draft_tokens has `width` of each row.
void fb_decode_ids(Pool* pool, const int32_t* rows, const int32_t* q_start, const int64_t* last_tokens,
                   const int64_t* draft_tokens, long width, long vocab, int64_t* ids, long num_seqs) {
    pool->op([=](Pool&) {
        for (long i = 0; i < num_seqs; ++i) {
            for (long j = 0; j < q_start[i + 1] - q_start[i]; ++j) {
                const int64_t id = j == 0       ? last_tokens[rows[i]]
                                   : j <= width ? draft_tokens[rows[i] * width + j - 1]
                                                : -1;
                ids[q_start[i] + j] = id >= 0 && id < vocab ? id : 0;
            }
        }
    });
}

// See `AcceptOps.accept`.
void fb_accept(Pool* pool, const int64_t* token_ids, const uint8_t* finite, const int64_t* positions,
               const int32_t* rows, const int32_t* q_start, const int64_t* draft_tokens, long width,
               int64_t* last_tokens, int64_t* kv_lens, int64_t* num_new, long num_seqs) {
    pool->op([=](Pool&) {
        for (long i = 0; i < num_seqs; ++i) {
            const long row = rows[i], count = q_start[i + 1] - q_start[i];
            num_new[i] = 0;
            if (count == 0) continue;
            const int64_t* drafts = draft_tokens + row * width;
            long last = q_start[i];
            for (long j = 0; j < std::min(count - 1, width) && finite[last] && token_ids[last] == drafts[j]; ++j) ++last;
            num_new[i] = last - q_start[i] + 1;
            last_tokens[row] = token_ids[last];
            kv_lens[row] = positions[last] + 1;
        }
    });
}
}

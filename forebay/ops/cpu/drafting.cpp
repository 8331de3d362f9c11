// A draft head between steps: what follows each token, a hidden state for each row, and the tokens it drafts.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "pool.h"

extern "C" {

// out[i] = table[rows[i]], rows of row_bytes.
void fb_gather_rows(Pool* pool, const char* table, const int32_t* rows, char* out, long row_bytes, long count) {
    pool->op([=](Pool&) {
        for (long i = 0; i < count; ++i) std::memcpy(out + i * row_bytes, table + rows[i] * row_bytes, row_bytes);
    });
}

// table[rows[i]] = values[i]; of a row that is named twice (padding) either value may stay.
void fb_scatter_rows(Pool* pool, char* table, const int32_t* rows, const char* values, long row_bytes, long count) {
    pool->op([=](Pool&) {
        for (long i = 0; i < count; ++i) std::memcpy(table + rows[i] * row_bytes, values + i * row_bytes, row_bytes);
    });
}

// table[rows[i]] = 0 where not keep[i].
void fb_clear_rows(Pool* pool, char* table, const int64_t* rows, const bool* keep, long row_bytes, long count) {
    pool->op([=](Pool&) {
        for (long i = 0; i < count; ++i)
            if (!keep[i]) std::memset(table + rows[i] * row_bytes, 0, row_bytes);
    });
}

// See `DraftingOps.follow`.
void fb_follow(Pool* pool, const int64_t* input_ids, const int64_t* positions, const int32_t* rows,
               const int32_t* q_start, const int64_t* last_tokens, const int64_t* kv_lens, long vocab,
               int64_t* next_ids, int32_t* ends, long num_seqs, long num_tokens) {
    pool->op([=](Pool&) {
        for (long i = 0; i < num_seqs; ++i) {
            const long row = rows[i], first = q_start[i], stop = q_start[i + 1];
            ends[i] = static_cast<int32_t>(std::clamp<long>(first - 1, 0, std::max(0L, num_tokens - 1)));
            if (first == stop) continue;
            const long stay = std::clamp<long>(kv_lens[row] - positions[first], 1, stop - first);
            ends[i] = static_cast<int32_t>(first + stay - 1);
            for (long t = first; t < stop; ++t) {
                const int64_t id = t == ends[i] || t == stop - 1 ? last_tokens[row] : input_ids[t + 1];
                next_ids[t] = id >= 0 && id < vocab ? id : 0;
            }
        }
    });
}

// See `DraftingOps.keep_drafts`; draft_tokens has `width` of each row.
void fb_keep_drafts(Pool* pool, const int64_t* ids, const int32_t* rows, const int32_t* counts, long column,
                     int64_t* draft_tokens, long width, int32_t* more, long num_seqs) {
    pool->op([=](Pool&) {
        for (long i = 0; i < num_seqs; ++i) {
            draft_tokens[(counts[i] > column ? rows[i] : 0) * width + column] = ids[i];
            more[i] = counts[i] > column + 1 ? rows[i] : 0;
        }
    });
}
}

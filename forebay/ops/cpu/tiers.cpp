// Two tiers of KV (HiSparse): all of it in the host tier, and of each decoding row the tokens that it reads again and
// again in a hot buffer. A layer's columns are one range of locations: resident pages, hot buffers, the host tier.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "rows.h"

namespace {

constexpr int kMostColumns = 4;  // of a layer: keys and values, and the scales of both

struct Layout {
    long num_columns;
    long page_size;
    long hot_base;
    long host_base;

    long row_base(long row) const { return hot_base + row * (num_columns + page_size); }
};

struct Sequences {
    const int32_t* page_table;
    long pages_per_row;
    const int32_t* rows;
    const int32_t* q_start;
    const int32_t* seq_lens;
    long count;
    const int32_t* active;  // by row
    const int32_t* newest;  // [rows, page_size]

    // The last sequence that begins no later than a token: those before it that begin there have none.
    long of_token(long token) const { return std::upper_bound(q_start, q_start + count, token) - q_start - 1; }
};

// Bytes of a token at `from + location * size`.
struct Bytes {
    char* from;
    long size;
};

struct Copy {
    long from;
    long to;
};

struct SwapCall {
    Layout layout;
    Sequences seqs;
    const int32_t* page_map;
    const int32_t* selected;  // [T, most]
    const int32_t* counts;    // [T]
    long most;
    int32_t* positions;  // [rows, num_columns], of this layer
    int32_t* last_used;
    Bytes columns[kMostColumns];
    int32_t* locations;  // [T, most]
    int32_t* token_rows;
    int32_t* token_start;
    int64_t* num_tokens;  // selected, loaded
};

long host_location(const SwapCall& call, long row, long position) {
    const long size = call.layout.page_size;
    const long page = call.seqs.page_table[row * call.seqs.pages_per_row + position / size];
    return call.layout.host_base + page * size + position % size;
}

// By position the column of a row that holds it, -1 for none; all entries are -1 between uses.
std::vector<int32_t>& columns_by_position(long num_positions) {
    thread_local std::vector<int32_t> columns;
    if (static_cast<long>(columns.size()) < num_positions) columns.resize(num_positions, -1);
    return columns;
}

// The columns that were not used in this step, the one that was used longest ago first; of equal ones the first. No
// more than `most`.
std::vector<int64_t> replaceable(const int32_t* last_used, long num_columns, int32_t now, long most) {
    std::vector<int64_t> columns;
    columns.reserve(num_columns);
    for (long c = 0; c < num_columns; ++c) {
        if (last_used[c] < now) columns.push_back(static_cast<int64_t>(last_used[c]) << 32 | c);
    }
    if (most < static_cast<long>(columns.size())) {
        std::nth_element(columns.begin(), columns.begin() + most, columns.end());
        columns.resize(most);
    }
    std::sort(columns.begin(), columns.end());
    return columns;
}

// Places of what the queries of a row with a hot buffer read. Adds to `copies` what has to be loaded; returns how many
// tokens were not in the hot buffer.
long place_hot(const SwapCall& call, long seq, std::vector<Copy>& copies) {
    const Layout& layout = call.layout;
    const long row = call.seqs.rows[seq], begin = call.seqs.q_start[seq], end = call.seqs.q_start[seq + 1];
    const int32_t now = call.seqs.seq_lens[seq] - static_cast<int32_t>(end - begin);
    const int32_t* newest = call.seqs.newest + row * layout.page_size;
    int32_t* positions = call.positions + row * layout.num_columns;
    int32_t* last_used = call.last_used + row * layout.num_columns;
    const long base = layout.row_base(row);
    std::vector<int32_t>& column_of = columns_by_position(call.seqs.pages_per_row * layout.page_size);
    for (long c = 0; c < layout.num_columns; ++c) {
        if (positions[c] >= 0) column_of[positions[c]] = static_cast<int32_t>(c);
    }
    long missing = 0;
    for (long t = begin; t < end; ++t) {
        for (long i = t * call.most, stop = i + call.counts[t]; i < stop; ++i) {
            const int32_t position = call.selected[i], column = column_of[position];
            const long at = position % layout.page_size;
            if (newest[at] == position) {
                call.locations[i] = static_cast<int32_t>(base + layout.num_columns + at);
            } else if (column >= 0) {
                last_used[column] = now;
                call.locations[i] = static_cast<int32_t>(base + column);
            } else {
                call.locations[i] = -1;
                ++missing;
            }
        }
    }
    long loaded = 0;
    if (missing > 0) {
        const std::vector<int64_t> free = replaceable(last_used, layout.num_columns, now, missing);
        auto next = free.begin();
        for (long t = begin; t < end; ++t) {
            for (long i = t * call.most, stop = i + call.counts[t]; i < stop; ++i) {
                if (call.locations[i] >= 0) continue;
                const int32_t position = call.selected[i];
                if (column_of[position] < 0) {
                    ++loaded;
                    const long on_host = host_location(call, row, position);
                    if (next == free.end()) {
                        call.locations[i] = static_cast<int32_t>(on_host);
                        continue;
                    }
                    const int32_t column = static_cast<int32_t>(*next++ & 0xffffffff);
                    if (positions[column] >= 0) column_of[positions[column]] = -1;
                    positions[column] = position;
                    column_of[position] = column;
                    last_used[column] = now;
                    copies.push_back({on_host, base + column});
                }
                call.locations[i] = static_cast<int32_t>(base + column_of[position]);
            }
        }
    }
    for (long c = 0; c < layout.num_columns; ++c) {
        if (positions[c] >= 0) column_of[positions[c]] = -1;
    }
    return loaded;
}

// Places of what a query of another row reads.
void place_cold(const SwapCall& call, long seq, long token) {
    const long size = call.layout.page_size, row = call.seqs.rows[seq];
    const int32_t* pages = call.seqs.page_table + row * call.seqs.pages_per_row;
    for (long i = token * call.most, stop = i + call.counts[token]; i < stop; ++i) {
        const long position = call.selected[i], page = pages[position / size], copy = call.page_map[page];
        const long place = copy != 0 ? copy * size : call.layout.host_base + page * size;
        call.locations[i] = static_cast<int32_t>(place + position % size);
    }
}

void load(const SwapCall& call, const Copy& copy) {
    for (const Bytes& column : call.columns) {
        if (column.from == nullptr) continue;
        std::memcpy(column.from + copy.to * column.size, column.from + copy.from * column.size, column.size);
    }
}

void swap_in(Pool& pool, const SwapCall& call) {
    const Sequences& seqs = call.seqs;
    const long tokens = seqs.q_start[seqs.count];
    pool.run(tokens, grain_for(4 * call.most), [&](long begin, long end) {
        for (long t = begin; t < end; ++t) {
            call.token_rows[t] = call.token_start[t] = static_cast<int32_t>(t);
            std::fill(call.locations + t * call.most + call.counts[t], call.locations + (t + 1) * call.most, -1);
            const long seq = seqs.of_token(t);
            if (seqs.active[seqs.rows[seq]] == 0) place_cold(call, seq, t);
        }
    });
    call.token_start[tokens] = static_cast<int32_t>(tokens);
    std::vector<std::vector<Copy>> copies(seqs.count);
    std::vector<long> num_loaded(seqs.count, 0);
    pool.run(seqs.count, 1, [&](long begin, long end) {
        for (long s = begin; s < end; ++s) {
            if (seqs.active[seqs.rows[s]] != 0 && seqs.q_start[s] < seqs.q_start[s + 1]) {
                num_loaded[s] = place_hot(call, s, copies[s]);
            }
        }
    });
    std::vector<Copy> all;
    for (long s = 0; s < seqs.count; ++s) {
        all.insert(all.end(), copies[s].begin(), copies[s].end());
        call.num_tokens[1] += num_loaded[s];
        if (seqs.active[seqs.rows[s]] == 0) continue;
        for (long t = seqs.q_start[s]; t < seqs.q_start[s + 1]; ++t) call.num_tokens[0] += call.counts[t];
    }
    pool.run(static_cast<long>(all.size()), grain_for(call.columns[0].size), [&](long begin, long end) {
        for (long i = begin; i < end; ++i) load(call, all[i]);
    });
}

}  // namespace

// Where the step's tokens go: device_loc and host_loc [T]. Tokens of active rows are their rows' newest from now on.
extern "C" void fb_bind_newest(Pool* pool, const int64_t* out_cache_loc, const int64_t* positions, const int32_t* rows,
                               const int32_t* q_start, long num_seqs, const int32_t* page_map, const int32_t* active,
                               int32_t* newest, long num_columns, long page_size, long hot_base, long host_base,
                               int64_t* device_loc, int64_t* host_loc) {
    const Layout layout{num_columns, page_size, hot_base, host_base};
    pool->op([=](Pool&) {
        for (long s = 0; s < num_seqs; ++s) {
            const long row = rows[s];
            for (long t = q_start[s]; t < q_start[s + 1]; ++t) {
                const long at = out_cache_loc[t] % page_size;
                host_loc[t] = layout.host_base + out_cache_loc[t];
                if (active[row] != 0) {
                    newest[row * page_size + at] = static_cast<int32_t>(positions[t]);
                    device_loc[t] = layout.row_base(row) + num_columns + at;
                } else {
                    device_loc[t] = static_cast<long>(page_map[out_cache_loc[t] / page_size]) * page_size + at;
                }
            }
        }
    });
}

// Where attention reads the selected tokens, as sequences of one query each; see `TierOps.swap_in`.
extern "C" void fb_swap_in(Pool* pool, const int32_t* selected, const int32_t* counts, long most,
                           const int32_t* page_table, long pages_per_row, const int32_t* rows, const int32_t* q_start,
                           const int32_t* seq_lens, long num_seqs, const int32_t* page_map, const int32_t* active,
                           const int32_t* newest, int32_t* positions, int32_t* last_used, long num_columns,
                           long page_size, long hot_base, long host_base, char* keys, long key_bytes, char* key_scales,
                           long key_scale_bytes, char* values, long value_bytes, char* value_scales,
                           long value_scale_bytes, int32_t* locations, int32_t* token_rows, int32_t* token_start,
                           int64_t* num_tokens) {
    const SwapCall call{
        {num_columns, page_size, hot_base, host_base},
        {page_table, pages_per_row, rows, q_start, seq_lens, num_seqs, active, newest},
        page_map,
        selected,
        counts,
        most,
        positions,
        last_used,
        {{keys, key_bytes}, {key_scales, key_scale_bytes}, {values, value_bytes}, {value_scales, value_scale_bytes}},
        locations,
        token_rows,
        token_start,
        num_tokens,
    };
    pool->op([call](Pool& p) { swap_in(p, call); });
}

// Paged attention for bfloat16 on AMX: scores and sums as tile products, weights rounded to bfloat16.
//
// With up to 16 query rows a head's scores are K Q^T: keys then are A tiles, which are read from the cache as they lie.
// With more they are Q K^T, with keys packed into B tiles once for all rows. The two multiply and add the same numbers
// in the same order. Values are packed, two keys side by side, into B tiles.
#if defined(FOREBAY_AMX)

#include "amx.h"
#include "attention_rows.h"
#include "halves.h"
#include "transpose.h"

namespace {

constexpr long kTileRows = 16;
constexpr long kTileElements = 512;  // 16 x 32 bfloat16
constexpr long kKeyTiles = kBlock / 16;
constexpr long kPairSteps = kBlock / 32;

// A walk's working memory, from the thread's scratch. Everything is a multiple of 64 bytes.
struct Work {
    bool direct;     // scores are K Q^T
    long head_rows;  // of a head, padded
    long columns;    // direct: of K Q^T, the head's rows rounded up to 4
    long width;      // head_dim rounded up to 32; what is beyond head_dim is zero
    bf16* q;  // direct: per head [width / 32] tiles, 16 pairs of dimensions by `columns` rows; else [rows][width]
    bf16* weights;   // [rows][kBlock]
    bf16* keys;      // direct: [kBlock][width], where they cannot be read in place;
                     // else [width / 32][kKeyTiles] tiles: 16 pairs of dimensions by 16 keys
    bf16* values;    // [kPairSteps][v_width / 16] tiles: 16 pairs of keys by 16 dimensions
    float* scores;   // [rows][kBlock]
    float* turned;   // direct: [kBlock][columns]
    float* factors;  // [2][kBlock], of keys and values
    RowSums sums;
    RowSums total;

    Work(const AttentionShape& shape, const Walk& walk)
        : width(round_up(shape.head_dim, 32)), sums(nullptr, shape.v_dim), total(sums) {
        const long rows = walk.num_queries * shape.group();
        direct = rows <= kTileRows;
        columns = round_up(rows, 4);
        head_rows = direct ? columns : round_up(rows, kTileRows);
        const long all_rows = walk.num_heads * head_rows;
        const long halves = all_rows * (width + kBlock) + kBlock * (width + sums.v_width);
        const long floats = all_rows * kBlock + kBlock * kTileRows + 2 * kBlock + 2 * all_rows * sums.row_floats;
        q = static_cast<bf16*>(thread_scratch(halves * 2 + floats * 4));
        weights = q + all_rows * width;
        keys = weights + all_rows * kBlock;
        values = keys + kBlock * width;
        scores = reinterpret_cast<float*>(values + kBlock * sums.v_width);
        turned = scores + all_rows * kBlock;
        factors = turned + kBlock * kTileRows;
        sums.memory = factors + 2 * kBlock;
        total.memory = sums.memory + all_rows * sums.row_floats;
    }
};

// -- queries ----------------------------------------------------------------------------------------------------------

template <class E>
void begin_rows(const AttentionCall<bf16, E>& call, const Walk& walk, const Work& work) {
    const AttentionShape& shape = call.shape;
    const long all_rows = walk.num_heads * work.head_rows, pairs = work.columns * 2;
    std::memset(work.q, 0, all_rows * work.width * sizeof(bf16));
    std::memset(work.weights, 0, all_rows * kBlock * sizeof(bf16));
    for_each_row(shape, walk, work.head_rows, [&](long row, const Query& query, long q_head) {
        const bf16* from = call.q + query.token * call.ldq + q_head * shape.head_dim;
        if (!work.direct) {
            std::copy_n(from, shape.head_dim, work.q + row * work.width);
            return;
        }
        bf16* to = work.q + row / work.head_rows * work.head_rows * work.width + row % work.head_rows * 2;
        for (long i = 0; i < shape.head_dim; ++i) to[i / 2 * pairs + i % 2] = from[i];
    });
}

// -- keys -------------------------------------------------------------------------------------------------------------

// Keys as rows of 64 bytes a step: 16 of them.
struct KeyRows {
    const bf16* at;
    long stride;
};

// The 16 keys from `lane` on. Those that no query sees may be anything: a key's score depends on no other key.
template <class E>
KeyRows key_rows(const AttentionCall<bf16, E>& call, const Block& block, long lane, long kv_head, const Work& work) {
    const AttentionShape& shape = call.shape;
    if constexpr (sizeof(E) == sizeof(bf16)) {
        if (shape.page_size % kTileRows == 0 && shape.head_dim % 32 == 0) {
            const long seen = std::max(lane, block.lanes.begin);
            return {call.k_cache.head(block.slots[seen] - (seen - lane), kv_head), call.k_cache.slot_stride};
        }
    }
    bf16* to = work.keys + lane * work.width;
    const long end = std::min(lane + kTileRows, block.lanes.end);
    for (long i = std::max(lane, block.lanes.begin); i < end; ++i) {
        const E* head = call.k_cache.head(block.slots[i], kv_head);
        for (long dim = 0; dim < work.width; dim += 32) {
            _mm512_store_si512(work.keys + i * work.width + dim, load_halves(head, dim, shape.head_dim));
        }
    }
    return {to, work.width};
}

// Scores of a head's rows, as K Q^T, turned round into [rows][kBlock].
template <class E>
void score_direct(const AttentionCall<bf16, E>& call, const Block& block, long kv_head, const bf16* q, float* scores,
                  const Work& work) {
    const long row_bytes = work.columns * 4;
    for (long lane = block.lanes.begin / 16 * 16; lane < block.lanes.end; lane += 16) {
        const KeyRows keys = key_rows(call, block, lane, kv_head, work);
        TILE_ZERO(0);
        for (long dim = 0; dim < work.width; dim += 32) {
            TILE_LOAD(4, keys.at + dim, keys.stride * 2);
            TILE_LOAD(5, q + dim * work.columns, row_bytes);
            TILE_DP(0, 4, 5);
        }
        TILE_STORE(0, work.turned + lane * work.columns, row_bytes);
    }
    for (long lane = block.lanes.begin / 16 * 16; lane < block.lanes.end; lane += 16) {
        const float* turned = work.turned + lane * work.columns;
        for (long row = 0; row < work.columns; row += 4) {
            transpose_quads([&](int key) { return turned + key * work.columns + row; },
                            [&](int i, Word of_row) {
                                _mm512_store_si512(scores + (row + i) * kBlock + lane, of_row);
                            });
        }
    }
}

// Packs a head's keys into B tiles.
template <class E>
void pack_keys(const AttentionCall<bf16, E>& call, const Block& block, long kv_head, const Work& work) {
    alignas(64) bf16 rows[16][32];
    for (long lane = block.lanes.begin / 16 * 16; lane < block.lanes.end; lane += 16) {
        for (long dim = 0; dim < work.width; dim += 32) {
            for (long i = 0; i < 16; ++i) {
                const bool seen = lane + i >= block.lanes.begin && lane + i < block.lanes.end;
                const __m512i row =
                    seen ? load_halves(call.k_cache.head(block.slots[lane + i], kv_head), dim, call.shape.head_dim)
                         : _mm512_setzero_si512();
                _mm512_store_si512(rows[i], row);
            }
            bf16* tile = work.keys + (dim / 32 * kKeyTiles + lane / 16) * kTileElements;
            for (int quarter = 0; quarter < 4; ++quarter) {
                transpose_quads([&](int key) { return rows[key] + quarter * 8; },
                                [&](int i, Word pairs) { _mm512_store_si512(tile + (quarter * 4 + i) * 32, pairs); });
            }
        }
    }
}

// scores [16][kBlock] of one row tile against the packed keys of `tiles` (begin..end of them).
void score_packed(const Work& work, const bf16* q, Lanes tiles, float* scores) {
    const bf16* k = work.keys;
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
    for (long dim = 0; dim < work.width; dim += 32, k += kKeyTiles * kTileElements) {
        TILE_LOAD(4, q + dim, work.width * 2);
        if (tiles.begin <= 0) {
            TILE_LOAD(6, k, 64);
            TILE_DP(0, 4, 6);
        }
        if (tiles.begin <= 1 && tiles.end > 1) {
            TILE_LOAD(7, k + kTileElements, 64);
            TILE_DP(1, 4, 7);
        }
        if (tiles.begin <= 2 && tiles.end > 2) {
            TILE_LOAD(6, k + 2 * kTileElements, 64);
            TILE_DP(2, 4, 6);
        }
        if (tiles.end > 3) {
            TILE_LOAD(7, k + 3 * kTileElements, 64);
            TILE_DP(3, 4, 7);
        }
    }
    TILE_STORE(0, scores, kBlock * 4);
    TILE_STORE(1, scores + 16, kBlock * 4);
    TILE_STORE(2, scores + 32, kBlock * 4);
    TILE_STORE(3, scores + 48, kBlock * 4);
}

// -- values -----------------------------------------------------------------------------------------------------------

// Packs a head's values. Those that no query sees are zeros: what such slots hold must not matter, and 0 x NaN is NaN.
template <class E>
void pack_values(const AttentionCall<bf16, E>& call, const Block& block, long kv_head, const Work& work) {
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37,
                                         5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    const long v_width = work.sums.v_width, v_dim = call.shape.v_dim;
    const auto head = [&](long lane) -> const E* {
        const bool seen = lane >= block.lanes.begin && lane < block.lanes.end;
        return seen ? call.v_cache.head(block.slots[lane], kv_head) : nullptr;
    };
    for (long lane = block.lanes.begin / 32 * 32; lane < round_up(block.lanes.end, 32); lane += 2) {
        bf16* tile = work.values + lane / 32 * (v_width / 16) * kTileElements + lane % 32 / 2 * 32;
        const E* even = head(lane);
        const E* odd = head(lane + 1);
        for (long dim = 0; dim < v_width; dim += 32, tile += 2 * kTileElements) {
            const __m512i a = even == nullptr ? _mm512_setzero_si512() : load_halves(even, dim, v_dim);
            const __m512i b = odd == nullptr ? _mm512_setzero_si512() : load_halves(odd, dim, v_dim);
            _mm512_store_si512(tile, _mm512_permutex2var_epi16(a, low, b));
            _mm512_store_si512(tile + kTileElements, _mm512_permutex2var_epi16(a, high, b));
        }
    }
}

// sums += weights [rows][kBlock] x values, for one row tile from `row` on, 32 dimensions at a time.
void add_values(const Work& work, long row, Lanes steps) {
    const long v_width = work.sums.v_width, row_bytes = work.sums.row_floats * 4;
    const long per_step = v_width / 16 * kTileElements;
    const bf16* weights = work.weights + row * kBlock;
    for (long dim = 0; dim < v_width; dim += 32) {
        float* sums = work.sums.values(row) + dim;
        const bf16* v = work.values + dim / 16 * kTileElements;
        TILE_LOAD(2, sums, row_bytes);
        TILE_LOAD(3, sums + 16, row_bytes);
        for (long step = steps.begin; step < steps.end; ++step) {
            TILE_LOAD(1, weights + step * 32, kBlock * 2);
            TILE_LOAD(6, v + step * per_step, 64);
            TILE_DP(2, 1, 6);
            TILE_LOAD(7, v + step * per_step + kTileElements, 64);
            TILE_DP(3, 1, 7);
        }
        TILE_STORE(2, sums, row_bytes);
        TILE_STORE(3, sums + 16, row_bytes);
    }
}

// -- the walk ---------------------------------------------------------------------------------------------------------

// Tiles 0 (C), 4 (A) and 5 (B) are for K Q^T, with as many columns as the head has rows; 2 and 3 (C), 1 (A), 6 and 7
// (B) for the sums, with as many rows.
TileConfig tiles_of(const Work& work) {
    TileConfig tiles;
    if (!work.direct) return tiles;
    const auto rows = static_cast<uint8_t>(work.columns);
    tiles.row_bytes[0] = tiles.row_bytes[5] = static_cast<uint16_t>(work.columns * 4);
    tiles.rows[1] = tiles.rows[2] = tiles.rows[3] = rows;
    return tiles;
}

// Weighs one row's keys and rounds the weights.
template <class E>
void weigh_row(const AttentionCall<bf16, E>& call, const Work& work, long row, Lanes lanes) {
    float* scores = work.scores + row * kBlock;
    const bool scaled = call.k_cache.factors != nullptr;
    weigh(scores, lanes, call.map, scaled ? work.factors : nullptr, work.sums, row);
    for (long i = 0; i < kBlock; i += 2 * W) {
        Vec a = load(scores + i), b = load(scores + i + W);
        if (scaled) {
            a = a * load(work.factors + kBlock + i);
            b = b * load(work.factors + kBlock + i + W);
        }
        _mm512_store_si512(work.weights + row * kBlock + i, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(b.v, a.v)));
    }
}

template <class E>
void load_factors(const AttentionCall<bf16, E>& call, const Block& block, long kv_head, const Work& work) {
    std::fill_n(work.factors, 2 * kBlock, 0.0f);
    for (long lane = block.lanes.begin; lane < block.lanes.end; ++lane) {
        work.factors[lane] = call.k_cache.factor(block.slots[lane], kv_head);
        work.factors[kBlock + lane] = call.v_cache.factor(block.slots[lane], kv_head);
    }
}

// The scores of one head's rows, the `head`-th of the walk's.
template <class E>
void score_head(const AttentionCall<bf16, E>& call, const Walk& walk, const Block& block, long head, const Work& work) {
    const long kv_head = walk.first_head + head, base = head * work.head_rows;
    const bf16* q = work.q + base * work.width;
    if (work.direct) return score_direct(call, block, kv_head, q, work.scores + base * kBlock, work);
    pack_keys(call, block, kv_head, work);
    const Lanes tiles{block.lanes.begin / 16, (block.lanes.end + 15) / 16};
    for (long row = 0; row < work.head_rows; row += kTileRows) {
        score_packed(work, q + row * work.width, tiles, work.scores + (base + row) * kBlock);
    }
}

template <class E>
void weigh_head(const AttentionCall<bf16, E>& call, const Walk& walk, const Block& block, long first, long head,
                const Work& work) {
    const AttentionShape& shape = call.shape;
    const long group = shape.group();
    if (call.k_cache.factors != nullptr) load_factors(call, block, walk.first_head + head, work);
    long row = head * work.head_rows;
    for (long i = 0; i < walk.num_queries; ++i) {
        const Lanes lanes = visible(walk.queries[i], first, shape.window);
        for (const long end = row + group; row < end; ++row) weigh_row(call, work, row, lanes);
    }
}

template <class E>
void add_head(const AttentionCall<bf16, E>& call, const Walk& walk, const Block& block, long head, const Work& work) {
    const Lanes steps{block.lanes.begin / 32, (block.lanes.end + 31) / 32};
    const long base = head * work.head_rows, tile_rows = work.direct ? work.head_rows : kTileRows;
    pack_values(call, block, walk.first_head + head, work);
    for (long row = 0; row < work.head_rows; row += tile_rows) add_values(work, base + row, steps);
}

// Each step is done for all heads before the next is: a tile's numbers take their time from one to the other.
template <class E>
void add_block(const AttentionCall<bf16, E>& call, const Walk& walk, const Block& block, long first, Prefetch<bf16, E>& next,
               const Work& work) {
    const long heads = walk.num_heads, share = kBlock / (2 * heads) + 1;
    for (long h = 0; h < heads; ++h) {
        score_head(call, walk, block, h, work);
        next.lanes(share);
    }
    for (long h = 0; h < heads; ++h) weigh_head(call, walk, block, first, h, work);
    for (long h = 0; h < heads; ++h) {
        add_head(call, walk, block, h, work);
        next.lanes(share);
    }
}

template <class E>
void attend(const AttentionCall<bf16, E>& call, const Walk& walk, const Walk& next_walk, const Partials& partials) {
    const AttentionShape& shape = call.shape;
    const Work work(shape, walk);
    begin_rows(call, walk, work);
    const TileScope scope(tiles_of(work));
    Block block(shape, walk, walk.begin * kBlock);
    add_segments(shape, walk, partials, work.head_rows, work.sums, work.total, [&](long at) {
        const bool last = at + 1 >= walk.end;
        const Walk& then = last ? next_walk : walk;
        const Block next(shape, then, (last ? next_walk.begin : at + 1) * kBlock);
        Prefetch<bf16, E> prefetch(call, then, next);
        add_block(call, walk, block, at * kBlock, prefetch, work);
        block = next;
    });
    if (walk.finishes) finish_rows(call, walk, work.head_rows, work.total);
}

}  // namespace

FOREBAY_ATTENTION(bf16, bf16, bf16_bf16, attend)
FOREBAY_ATTENTION(bf16, int8_t, bf16_i8, attend)

#endif

// Paged attention for bfloat16 on AMX: scores = Q K^T and sums += P V as tile products, P rounded to bfloat16.
//
// Both K and V are packed per block into B tiles (pairs of the summed index side by side), which a piece then uses for
// all its query rows. Decoding runs the same code with as few rows as it has.
#include "amx.h"
#include "attention.h"

namespace {

constexpr long kTileRows = 16;
constexpr long kTileElements = 512;  // 16 x 32 bfloat16
constexpr long kKeyTiles = kBlock / 16;
constexpr long kPairSteps = kBlock / 32;

// One piece's working memory, from the thread's scratch. Everything is a multiple of 64 bytes.
struct Work {
    long width;      // head_dim rounded up to 32; what is beyond head_dim is zero
    long v_width;    // v_dim likewise
    bf16* q;         // [rows][width]
    bf16* weights;   // [rows][kBlock]
    bf16* k_tiles;   // [width / 32][kKeyTiles] tiles: 16 pairs of dimensions by 16 keys
    bf16* v_tiles;   // [kPairSteps][v_width / 16] tiles: 16 pairs of keys by 16 dimensions
    float* scores;   // [rows][kBlock]
    float* sums;     // [rows][v_width]
    RowState* states;  // [rows]

    Work(long head_dim, long v_dim, long rows) : width(round_up(head_dim, 32)), v_width(round_up(v_dim, 32)) {
        const long halves = rows * width + rows * kBlock + kBlock * (width + v_width);
        const long floats = rows * kBlock + rows * v_width;
        q = static_cast<bf16*>(thread_scratch(halves * 2 + floats * 4 + rows * sizeof(RowState)));
        weights = q + rows * width;
        k_tiles = weights + rows * kBlock;
        v_tiles = k_tiles + kBlock * width;
        scores = reinterpret_cast<float*>(v_tiles + kBlock * v_width);
        sums = scores + rows * kBlock;
        states = reinterpret_cast<RowState*>(sums + rows * v_width);
    }
};

__mmask32 first_halves(long n) { return n >= 32 ? ~0u : n <= 0 ? 0u : (1u << n) - 1; }

// 16 keys by 16 pairs of dimensions -> transposed; a null key is zeros. Four quarter-rows of four different keys are brought together by the
// loads, so that only the 4 x 4 transposes within 128 bits are left to the shuffle port.
void pack_key_tile(const bf16* const* keys, long dim, long head_dim, bf16* tile) {
    alignas(64) bf16 rows[16][32];
    const bf16* source[16];
    for (int i = 0; i < 16; ++i) {
        source[i] = keys[i] == nullptr ? rows[i] : keys[i] + dim;
        if (keys[i] == nullptr || head_dim - dim < 32) {
            const __mmask32 mask = keys[i] == nullptr ? 0 : first_halves(head_dim - dim);
            const bf16* from = keys[i] == nullptr ? rows[i] : keys[i] + dim;
            _mm512_store_si512(rows[i], _mm512_maskz_loadu_epi16(mask, from));
            source[i] = rows[i];
        }
    }
    for (int c = 0; c < 4; ++c) {
        __m512i v[4];
        for (int r = 0; r < 4; ++r) {
            const auto part = [&](int row) {
                return _mm_loadu_si128(reinterpret_cast<const __m128i*>(source[row] + c * 8));
            };
            v[r] = _mm512_castsi128_si512(part(r));
            v[r] = _mm512_inserti32x4(v[r], part(r + 4), 1);
            v[r] = _mm512_inserti32x4(v[r], part(r + 8), 2);
            v[r] = _mm512_inserti32x4(v[r], part(r + 12), 3);
        }
        const __m512i a = _mm512_unpacklo_epi32(v[0], v[1]), b = _mm512_unpackhi_epi32(v[0], v[1]);
        const __m512i c2 = _mm512_unpacklo_epi32(v[2], v[3]), d = _mm512_unpackhi_epi32(v[2], v[3]);
        bf16* out = tile + c * 4 * 32;
        _mm512_store_si512(out, _mm512_unpacklo_epi64(a, c2));
        _mm512_store_si512(out + 32, _mm512_unpackhi_epi64(a, c2));
        _mm512_store_si512(out + 64, _mm512_unpacklo_epi64(b, d));
        _mm512_store_si512(out + 96, _mm512_unpackhi_epi64(b, d));
    }
}

// Two keys' values side by side: dimension by dimension, the even key in the low half of each 32 bits.
void pack_value_pair(const bf16* even, const bf16* odd, long head_dim, long width, bf16* tiles) {
    const auto widened = [&](const bf16* head, long dim) {
        if (head == nullptr) return _mm512_setzero_si512();
        const __mmask16 mask = static_cast<__mmask16>(first_halves(head_dim - dim));
        return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, head + dim));
    };
    for (long dim = 0; dim < width; dim += 16, tiles += kTileElements) {
        _mm512_store_si512(tiles, _mm512_or_si512(widened(even, dim), _mm512_slli_epi32(widened(odd, dim), 16)));
    }
}

// scores [16 or fewer rows][kBlock] of one row tile against the first `key_tiles` x 16 keys.
void score_rows(const Work& work, long row, long key_tiles) {
    const bf16* q = work.q + row * work.width;
    const bf16* k = work.k_tiles;
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
    for (long dim = 0; dim < work.width; dim += 32, k += kKeyTiles * kTileElements) {
        TILE_LOAD(4, q + dim, work.width * 2);
        TILE_LOAD(6, k, 64);
        TILE_DP(0, 4, 6);
        if (key_tiles == 1) continue;
        TILE_LOAD(7, k + kTileElements, 64);
        TILE_DP(1, 4, 7);
        if (key_tiles == 2) continue;
        TILE_LOAD(6, k + 2 * kTileElements, 64);
        TILE_DP(2, 4, 6);
        if (key_tiles == 3) continue;
        TILE_LOAD(7, k + 3 * kTileElements, 64);
        TILE_DP(3, 4, 7);
    }
    float* scores = work.scores + row * kBlock;
    TILE_STORE(0, scores, kBlock * 4);
    TILE_STORE(1, scores + 16, kBlock * 4);
    TILE_STORE(2, scores + 32, kBlock * 4);
    TILE_STORE(3, scores + 48, kBlock * 4);
}

// sums [rows][v_width] += weights [rows][kBlock] x values, for one row tile, 32 dimensions at a time.
void add_values(const Work& work, long row, long pair_steps) {
    const long per_step = work.v_width / 16 * kTileElements;
    const bf16* weights = work.weights + row * kBlock;
    for (long dim = 0; dim < work.v_width; dim += 32) {
        float* sums = work.sums + row * work.v_width + dim;
        const bf16* v = work.v_tiles + dim / 16 * kTileElements;
        TILE_LOAD(0, sums, work.v_width * 4);
        TILE_LOAD(1, sums + 16, work.v_width * 4);
        for (long step = 0; step < pair_steps; ++step) {
            TILE_LOAD(4, weights + step * 32, kBlock * 2);
            TILE_LOAD(6, v + step * per_step, 64);
            TILE_DP(0, 4, 6);
            TILE_LOAD(7, v + step * per_step + kTileElements, 64);
            TILE_DP(1, 4, 7);
        }
        TILE_STORE(0, sums, work.v_width * 4);
        TILE_STORE(1, sums + 16, work.v_width * 4);
    }
}

// Where one block of an item's first head lies in the caches, per lane; null for the lanes that no query sees. Null stands
// for zeros: what such slots hold must not matter, and 0 x NaN is NaN.
struct Block {
    long lanes;  // up to the last one seen
    const bf16* keys[kBlock] = {};
    const bf16* values[kBlock] = {};

    Block(const AttentionCall<bf16>& call, const Item& item, long first) {
        const Piece& piece = *item.piece;
        lanes = std::min(kBlock, piece.first_position + piece.num_tokens - first);
        const long begin = std::max(0L, oldest_position(call, piece) - first);
        for_each_key(call, piece.seq, first, {begin, lanes}, [&](long lane, long slot) {
            keys[lane] = call.k_cache.head(slot, item.first_head);
            values[lane] = call.v_cache.head(slot, item.first_head);
        });
    }
};

void prefetch(const bf16* from, long elements) {
    for (long i = 0; i < elements; i += 32) _mm_prefetch(reinterpret_cast<const char*>(from + i), _MM_HINT_T0);
}

// Fetches some lanes of a block, for all heads.
void prefetch(const AttentionCall<bf16>& call, const Block& block, Lanes lanes, long num_heads) {
    const bool apart = call.k_cache.at != call.v_cache.at;
    for (long lane = lanes.begin; lane < lanes.end && block.keys[lane] != nullptr; ++lane) {
        prefetch(block.keys[lane], num_heads * call.head_dim);
        if (apart) prefetch(block.values[lane], num_heads * call.v_dim);
    }
}

inline const bf16* offset(const bf16* head, long by) { return head == nullptr ? nullptr : head + by; }

// Packs one head of a block, the `head`-th of the item's, and meanwhile fetches its share of the block that is next,
// little by little: fetched all at once, it would stop this core until it is there.
void pack_block(const AttentionCall<bf16>& call, const Block& block, const Block& next, long head, long num_heads,
                const Work& work) {
    const long share = kBlock / num_heads + 1;
    const long k_offset = head * call.k_cache.head_stride, v_offset = head * call.v_cache.head_stride;
    for (long t = 0; t < kKeyTiles; ++t) {
        const long begin = std::min(kBlock, head * share + t * share / kKeyTiles);
        prefetch(call, next, {begin, std::min(kBlock, head * share + (t + 1) * share / kKeyTiles)}, num_heads);
        if (t * 16 >= block.lanes) continue;
        const bf16* keys[16];
        for (long i = 0; i < 16; ++i) keys[i] = offset(block.keys[t * 16 + i], k_offset);
        for (long dim = 0; dim < work.width; dim += 32) {
            pack_key_tile(keys, dim, call.head_dim, work.k_tiles + (dim / 32 * kKeyTiles + t) * kTileElements);
        }
    }
    for (long i = 0; i < round_up(block.lanes, 32); i += 2) {
        bf16* tiles = work.v_tiles + i / 32 * (work.v_width / 16) * kTileElements + i % 32 / 2 * 32;
        pack_value_pair(offset(block.values[i], v_offset), offset(block.values[i + 1], v_offset), call.v_dim,
                        work.v_width, tiles);
    }
}

void weigh_row(const Work& work, long row, Lanes lanes, float scale) {
    float* scores = work.scores + row * kBlock;
    const float shrink = softmax_block(scores, lanes, scale, work.states[row]);
    for (long i = 0; i < kBlock; i += W) store(work.weights + row * kBlock + i, load(scores + i));
    if (shrink == 1.0f) return;
    float* sums = work.sums + row * work.v_width;
    for (long i = 0; i < work.v_width; i += W) store(sums + i, load(sums + i) * set1(shrink));
}

// Query row r of the item's `head`-th head.
struct QueryRow {
    long token;
    long q_head;

    QueryRow(const AttentionCall<bf16>& call, const Item& item, long head, long r) {
        const long group = group_size(call);
        token = item.piece->first_token + r / group;
        q_head = (item.first_head + head) * group + r % group;
    }
};

// Head h's rows begin at h * padded_rows in the working memory.
void begin_rows(const AttentionCall<bf16>& call, const Item& item, long rows, long padded_rows, const Work& work) {
    const long all_rows = item.num_heads * padded_rows;
    std::memset(work.q, 0, all_rows * work.width * sizeof(bf16));
    std::memset(work.weights, 0, all_rows * kBlock * sizeof(bf16));
    std::fill_n(work.sums, all_rows * work.v_width, 0.0f);
    for (long h = 0; h < item.num_heads; ++h) {
        for (long r = 0; r < rows; ++r) {
            const QueryRow row(call, item, h, r);
            std::copy_n(call.q + row.token * call.ldq + row.q_head * call.head_dim, call.head_dim,
                        work.q + (h * padded_rows + r) * work.width);
            work.states[h * padded_rows + r] = first_state(call, row.q_head);
        }
    }
}

void finish_rows(const AttentionCall<bf16>& call, const Item& item, long rows, long padded_rows, const Work& work) {
    for (long h = 0; h < item.num_heads; ++h) {
        for (long r = 0; r < rows; ++r) {
            const QueryRow row(call, item, h, r);
            const long at = h * padded_rows + r;
            bf16* out = call.out + (row.token * call.q_heads + row.q_head) * call.v_dim;
            const Vec inverse = set1(1.0f / work.states[at].sum);
            for_each_vector(call.v_dim, [&](long i, long part) {
                store_part(out + i, load(work.sums + at * work.v_width + i) * inverse, part);
            });
        }
    }
}

void attend(const AttentionCall<bf16>& call, const Item& item, const Item& next_item) {
    const Piece& piece = *item.piece;
    const long group = group_size(call), rows = piece.num_tokens * group;
    const long tile_rows = std::min(rows, kTileRows), padded_rows = round_up(rows, tile_rows);
    const Work work(call.head_dim, call.v_dim, round_up(item.num_heads * padded_rows, kTileRows));
    begin_rows(call, item, rows, padded_rows, work);

    const TileScope scope(tile_rows);
    const long end = piece.first_position + piece.num_tokens;
    Block block(call, item, first_block(call, piece));
    for (long first = first_block(call, piece); first < end; first += kBlock) {
        const bool last = first + kBlock >= end;
        const Block next = last ? Block(call, next_item, first_block(call, *next_item.piece))
                                : Block(call, item, first + kBlock);
        for (long h = 0; h < item.num_heads; ++h) {
            pack_block(call, block, next, h, item.num_heads, work);
            for (long tile = 0; tile < padded_rows; tile += tile_rows) {
                const long base = h * padded_rows;
                score_rows(work, base + tile, (block.lanes + 15) / 16);
                for (long r = tile; r < std::min(rows, tile + tile_rows); ++r) {
                    weigh_row(work, base + r, visible(piece.first_position + r / group, first, call.window), call.scale);
                }
                add_values(work, base + tile, (block.lanes + 31) / 32);
            }
        }
        block = next;
    }
    finish_rows(call, item, rows, padded_rows, work);
}

}  // namespace

FOREBAY_ATTENTION(bf16, bf16, attend)

// bfloat16 linear on AMX: 32 rows by one panel of 32 outputs at a time, the sums in four tiles over all of K.
#if defined(FOREBAY_AMX)

#include <sys/syscall.h>
#include <unistd.h>

#include <vector>

#include "amx.h"
#include "linear.h"
#include "linear_q.h"
#include "simd.h"

namespace {

constexpr long kTileRows = 16;
constexpr long kChunkBytes = 1 << 20;  // of x that one piece of work covers: half of a 2 MiB L2
constexpr long kPrefetchBytes = 8192;  // far enough ahead to cover memory latency while one core streams 15 GB/s

// Tiles of 16 rows of x. The last one is a zero-padded copy where x has no 16 rows or no whole steps left to read.
struct Rows {
    const bf16* x;
    long ldx;
    const bf16* last;
    long last_tile;
    long ld_last;

    const bf16* tile(long i) const { return i == last_tile ? last : x + i * kTileRows * ldx; }
    long bytes(long i) const { return (i == last_tile ? ld_last : ldx) * static_cast<long>(sizeof(bf16)); }
};

inline void prefetch_tile(const bf16* p) {
    for (long line = 0; line < kTile * 2; line += 64) __builtin_prefetch(reinterpret_cast<const char*>(p) + line);
}

// sums: float [16 or 32][32].
template <class Panel>
void one_row_tile(const Rows& rows, long tile, Panel& panel, long steps, float* sums) {
    const bf16* a = rows.tile(tile);
    const long lda = rows.bytes(tile);
    TILE_ZERO(0);
    TILE_ZERO(1);
    for (long s = 0; s < steps; ++s, a += kStep) {
        const bf16* weights = panel.step(s);
        if constexpr (std::is_same_v<Panel, DensePanel<bf16>>) {
            prefetch_tile(weights + kPrefetchBytes / 2);
            prefetch_tile(weights + kPrefetchBytes / 2 + kTile);
        }
        TILE_LOAD(4, a, lda);
        TILE_LOAD(6, weights, 64);
        TILE_LOAD(7, weights + kTile, 64);
        TILE_DP(0, 4, 6);
        TILE_DP(1, 4, 7);
    }
    TILE_STORE(0, sums, kPanel * 4);
    TILE_STORE(1, sums + 16, kPanel * 4);
}

// The panel is used for every row tile and x only once per panel: kept out of L1, x does not evict the panel from it,
// which is worth 30% at 512 rows (one Sapphire Rapids core, K 576).
template <class Panel>
void two_row_tiles(const Rows& rows, long tile, Panel& panel, long steps, float* sums) {
    const bf16* a = rows.tile(tile);
    const bf16* b = rows.tile(tile + 1);
    const long lda = rows.bytes(tile);
    const long ldb = rows.bytes(tile + 1);
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
    for (long s = 0; s < steps; ++s, a += kStep, b += kStep) {
        const bf16* weights = panel.step(s);
        TILE_LOAD_ONCE(4, a, lda);
        TILE_LOAD(6, weights, 64);
        TILE_DP(0, 4, 6);
        TILE_LOAD(7, weights + kTile, 64);
        TILE_DP(1, 4, 7);
        TILE_LOAD_ONCE(5, b, ldb);
        TILE_DP(2, 5, 6);
        TILE_DP(3, 5, 7);
    }
    TILE_STORE(0, sums, kPanel * 4);
    TILE_STORE(1, sums + 16, kPanel * 4);
    TILE_STORE(2, sums + 16 * kPanel, kPanel * 4);
    TILE_STORE(3, sums + 16 * kPanel + 16, kPanel * 4);
}

template <class Out>
void write_rows(const float* sums, long rows, const float* bias, Out* out, long ldo, long columns) {
    for (long r = 0; r < rows; ++r) {
        for (long c = 0; c < columns; c += W) {
            store_part(out + r * ldo + c, load(sums + r * kPanel + c) + load(bias + c), std::min<long>(W, columns - c));
        }
    }
}

// x [rows, inputs] cut into tiles; `copy` holds what of it had to be copied.
class Tiles {
  public:
    Tiles(const bf16* x, long ldx, long rows, long inputs)
        : tile_rows_(std::min(rows, kTileRows)),
          count_(ceil_div(rows, kTileRows)),
          rows_(rows),
          source_{x, ldx, nullptr, -1, ceil_div(inputs, kStep) * kStep} {
        const long width = source_.ld_last;
        const bool whole_steps = width == inputs;
        // Without whole steps everything is copied; otherwise at most the rows of a last, partial tile.
        const long first_copied = whole_steps ? rows / tile_rows_ * tile_rows_ : 0;
        if (first_copied == rows) return;
        copy_.assign((count_ * tile_rows_ - first_copied) * width, bf16{0});
        for (long r = first_copied; r < rows; ++r) {
            std::copy_n(x + r * ldx, inputs, copy_.data() + (r - first_copied) * width);
        }
        if (whole_steps) {
            source_.last = copy_.data();
            source_.last_tile = count_ - 1;
        } else {
            source_.x = copy_.data();
            source_.ldx = width;
        }
    }

    long tile_rows() const { return tile_rows_; }
    long count() const { return count_; }
    long steps() const { return source_.ld_last / kStep; }

    // Tiles first..last by one panel; bias and out begin with it. The tile registers are configured for tile_rows.
    template <class Panel, class Out>
    void multiply(long first, long last, Panel panel, const float* bias, Out* out, long ldo, long columns) const {
        alignas(64) float sums[2 * kTileRows * kPanel];
        for (long tile = first; tile < last; tile += 2) {
            if (tile + 1 < last) {
                two_row_tiles(source_, tile, panel, steps(), sums);
            } else {
                one_row_tile(source_, tile, panel, steps(), sums);
            }
            const long row = tile * kTileRows;
            write_rows(sums, std::min(2 * kTileRows, rows_ - row), bias, out + row * ldo, ldo, columns);
        }
    }

  private:
    long tile_rows_;
    long count_;
    long rows_;
    Rows source_;
    std::vector<bf16> copy_;
};

template <class Panels, class Out>
void linear(Pool& pool, const bf16* x, long ldx, const Panels& panels, const float* bias, Out* out, long rows,
            long inputs, long outputs) {
    const Tiles tiles(x, ldx, rows, inputs);
    const long count = ceil_div(outputs, kPanel);
    const long tile_bytes = tiles.steps() * kStep * kTileRows * static_cast<long>(sizeof(bf16));
    const long chunk_tiles = std::max(2L, kChunkBytes / tile_bytes / 2 * 2);
    const long items = count * ceil_div(tiles.count(), chunk_tiles);
    pool.run(items, pool.grain_of(items), count, [&](long begin, long end) {
        const TileScope scope(tiles.tile_rows());
        for (long item = begin; item < end; ++item) {
            const long panel = item % count, column = panel * kPanel, first = item / count * chunk_tiles;
            panels.open(panel, [&](auto opened) {
                tiles.multiply(first, std::min(first + chunk_tiles, tiles.count()), opened, bias + column, out + column,
                               outputs, std::min(kPanel, outputs - column));
            });
        }
    });
}

template <class Panels>
void linear_panels(const void* x, long ldx, const Panels& panels, const float* bias, void* out, long ldo, long rows,
                   long inputs, long outputs, long first, long end) {
    const Tiles tiles(static_cast<const bf16*>(x), ldx, rows, inputs);
    const TileScope scope(tiles.tile_rows());
    for (long panel = first; panel < end; ++panel) {
        const long column = panel * kPanel;
        panels.open(panel, [&](auto opened) {
            tiles.multiply(0, tiles.count(), opened, bias + column, static_cast<bf16*>(out) + column, ldo,
                           std::min(kPanel, outputs - column));
        });
    }
}

}  // namespace

#include "linear_bf16_entries.h"

#define FOREBAY_LINEAR_OPENED(Out, suffix)                                                                          \
    void fb_linear_q_##suffix(Pool* pool, const bf16* x, long ldx, const void* packed, const float* bias, Out* out, \
                              long rows, long inputs, long outputs) {                                               \
        pool->op([=](Pool& p) {                                                                                     \
            linear(p, x, ldx, CodePanels<bf16>(packed, inputs), bias, out, rows, inputs, outputs);                  \
        });                                                                                                         \
    }

extern "C" {

FOREBAY_LINEAR_OPENED(bf16, bf16)
FOREBAY_LINEAR_OPENED(float, bf16_f32)

void fb_linear_panels_q_bf16(FOREBAY_LINEAR_PANELS) {
    linear_panels(x, ldx, CodePanels<bf16>(packed, inputs), bias, out, ldo, rows, inputs, outputs, first, end);
}

// Asks the kernel for the tile registers, once for the process and its later threads; 0 if they may be used.
int fb_cpu_init() {
    constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
    constexpr long kTileData = 18;               // XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0 ? 0 : 1;
}
}

#endif

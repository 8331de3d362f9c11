// The AMX instructions in use, as inline assembly: gcc 12's intrinsics do not say that they read and write memory, so
// the compiler may move a store behind the tile load that needs it.
//
// A tile is 16 rows of 64 bytes. C (float32 [m, 16]) += A (bfloat16 [m, 32]) by B (bfloat16 [16 pairs of k, 16, 2]).
// Each row of C depends on its own row of A alone, so m may differ between calls without changing a bit.
#pragma once

#include <algorithm>
#include <cstdint>

#define TILE_ZERO(t) asm volatile("tilezero %%tmm" #t ::: "memory")
#define TILE_LOAD(t, p, stride) \
    asm volatile("tileloadd (%0,%1,1), %%tmm" #t ::"r"(p), "r"(static_cast<long>(stride)) : "memory")
#define TILE_LOAD_ONCE(t, p, stride) /* by way of L2: what L1 holds stays there */ \
    asm volatile("tileloaddt1 (%0,%1,1), %%tmm" #t ::"r"(p), "r"(static_cast<long>(stride)) : "memory")
#define TILE_STORE(t, p, stride) \
    asm volatile("tilestored %%tmm" #t ", (%0,%1,1)" ::"r"(p), "r"(static_cast<long>(stride)) : "memory")
#define TILE_DP(c, a, b) asm volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c ::: "memory")

// The shapes of the tiles; all of 16 rows of 64 bytes at first.
struct alignas(64) TileConfig {
    uint8_t palette = 1;
    uint8_t start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Configures the tiles of one thread for its scope.
class TileScope {
  public:
    explicit TileScope(const TileConfig& config) { asm volatile("ldtilecfg %0" ::"m"(config) : "memory"); }

    // Tiles 0-3 are C and 4-5 are A, with `rows` rows; 6-7 are B.
    explicit TileScope(long rows) : TileScope(products(rows)) {}
    ~TileScope() { asm volatile("tilerelease" ::: "memory"); }
    TileScope(const TileScope&) = delete;
    TileScope& operator=(const TileScope&) = delete;

  private:
    static TileConfig products(long rows) {
        TileConfig config;
        std::fill_n(config.rows, 6, static_cast<uint8_t>(rows));
        return config;
    }
};

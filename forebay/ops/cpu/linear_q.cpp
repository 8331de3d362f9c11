// Linear layers on quantized weights: rows are quantized, then cut into tiles that go through each panel.
#include "linear_q.h"

#include <cstdlib>
#include <memory>
#include <new>

#include "linear_q_rows.h"
#include "quantize.h"

#if defined(FOREBAY_AMX)
#include "linear_q_tiles.h"
#endif

namespace {

constexpr long kChunkBytes = 1 << 20;  // of quantized rows that one piece of work covers: half of a 2 MiB L2

struct Shape {
    long rows;
    long groups;
    long outputs;
};

// The rows of x, quantized and cut evenly into tiles.
struct Tiles {
    long rows;  // of each tile
    long count;
    long bytes;  // of each tile
    const char* data;

    RowTile tile(long i) const { return {data + i * bytes, rows}; }
};

struct Free {
    void operator()(void* p) const { std::free(p); }
};
using Buffer = std::unique_ptr<char, Free>;

Buffer allocate(long bytes) {
    Buffer buffer(static_cast<char*>(std::aligned_alloc(64, round_up(bytes, 64))));
    if (!buffer) throw std::bad_alloc();
    return buffer;
}

Tiles cut(long rows, long groups) {
#if defined(FOREBAY_AMX)
    if (rows > kFewRows) {
        const long tiles = ceil_div(rows, 16);
        const long each = round_up(ceil_div(rows, tiles), 2);
        return {each, tiles, groups * RowTile::group_bytes(each), nullptr};
    }
#endif
    const long tiles = ceil_div(rows, kFewRows);
    const long each = ceil_div(rows, tiles);
    return {each, tiles, groups * RowTile::group_bytes(each), nullptr};
}

template <class Out>
void write_rows(const float* sums, long rows, const float* bias, Out* out, long ldo, long columns) {
    for (long r = 0; r < rows; ++r) {
        for (long c = 0; c < columns; c += W) {
            store_part(out + r * ldo + c, load(sums + r * kPanel + c) + load(bias + c), std::min<long>(W, columns - c));
        }
    }
}

// Panels begin..end, counted on over all chunks of tiles: for each tile of the chunk, done(tile, panel, its sums).
template <class C, class Done>
void multiply(const Tiles& x, const uint8_t* packed, const Shape& shape, long chunk, long begin, long end,
              const Done& done) {
    const CodeHeader& header = header_of(packed);
    const long panels = ceil_div(shape.outputs, kPanel);
    alignas(64) float sums[16 * kPanel];
    const auto each = [&](auto by_panel) {
        for (long item = begin; item < end; ++item) {
            const long panel = item % panels;
            const long first = item / panels * chunk;
            by_panel(packed + kHeaderBytes + panel * shape.groups * C::kBlock, [&](auto product) {
                for (long t = first; t < std::min(first + chunk, x.count); ++t) {
                    product(x.tile(t));
                    done(t, panel, sums);
                }
            });
        }
    };
#if defined(FOREBAY_AMX)
    if (shape.rows > kFewRows) {
        const TileScope scope(x.rows, kGroup);
        void* scratch = thread_scratch(open_bytes<C>(shape.groups));
        each([&](const uint8_t* panel, const auto& for_tiles) {
            const OpenPanel open = open_panel<C>(panel, shape.groups, header.zero, scratch);
            for_tiles([&](const RowTile& tile) { tile_by_panel<C>(open, tile, shape.groups, sums); });
        });
        return;
    }
#endif
    const int32_t offset = offset_of<C>(header);
    each([&](const uint8_t* panel, const auto& for_tiles) {
        for_tiles([&](const RowTile& tile) { up_to_few_rows<C>(panel, tile, shape.groups, offset, sums); });
    });
}

template <class In, class Out>
void linear(Pool& pool, const In* x, long ldx, const uint8_t* packed, const float* bias, Out* out, const Shape& shape) {
    Tiles tiles = cut(shape.rows, shape.groups);
    const Buffer buffer = allocate(tiles.count * tiles.bytes);
    tiles.data = buffer.get();
    pool.run(tiles.count, std::max(1L, 8192 / (tiles.rows * shape.groups * kGroup)), [&](long begin, long end) {
        for (long t = begin; t < end; ++t) {
            const long first = t * tiles.rows;
            quantize_tile(x + first * ldx, ldx, std::min(tiles.rows, shape.rows - first), shape.groups, tiles.rows,
                          buffer.get() + t * tiles.bytes);
        }
    });
    const long panels = ceil_div(shape.outputs, kPanel);
    const long chunk = std::max(1L, kChunkBytes / tiles.bytes);
    with_codes(header_of(packed), [&](auto codes) {
        pool.run(panels * ceil_div(tiles.count, chunk), [&](long begin, long end) {
            multiply<decltype(codes)>(tiles, packed, shape, chunk, begin, end, [&](long t, long panel, const float* sums) {
                const long row = t * tiles.rows, column = panel * kPanel;
                write_rows(sums, std::min(tiles.rows, shape.rows - row), bias + column,
                           out + row * shape.outputs + column, shape.outputs, std::min(kPanel, shape.outputs - column));
            });
        });
    });
}

// As linear.h says of LinearPanels.
template <class T>
void linear_panels(const T* x, long ldx, const uint8_t* packed, const float* bias, T* out, long ldo, const Shape& shape,
                   long first, long end) {
    Tiles tiles = cut(shape.rows, shape.groups);
    const Buffer buffer = allocate(tiles.count * tiles.bytes);
    tiles.data = buffer.get();
    for (long t = 0; t < tiles.count; ++t) {
        const long row = t * tiles.rows;
        quantize_tile(x + row * ldx, ldx, std::min(tiles.rows, shape.rows - row), shape.groups, tiles.rows,
                      buffer.get() + t * tiles.bytes);
    }
    with_codes(header_of(packed), [&](auto codes) {
        multiply<decltype(codes)>(
            tiles, packed, shape, tiles.count, first, end, [&](long t, long panel, const float* sums) {
                const long row = t * tiles.rows, column = panel * kPanel;
                write_rows(sums, std::min(tiles.rows, shape.rows - row), bias + column, out + row * ldo + column, ldo,
                           std::min(kPanel, shape.outputs - column));
            });
    });
}

}  // namespace

#define FOREBAY_LINEAR_PANELS_Q(T, suffix)                                                                            \
    void fb_linear_panels_q_##suffix(FOREBAY_LINEAR_PANELS) {                                                         \
        linear_panels(static_cast<const T*>(x), ldx, static_cast<const uint8_t*>(packed), bias, static_cast<T*>(out), \
                      ldo, Shape{rows, inputs / kGroup, outputs}, first, end);                                        \
    }

#define FOREBAY_LINEAR_Q(In, Out, suffix)                                                                       \
    void fb_linear_q_##suffix(Pool* pool, const In* x, long ldx, const uint8_t* packed, const float* bias,      \
                              Out* out, long rows, long inputs, long outputs) {                                 \
        pool->op([=](Pool& p) { linear(p, x, ldx, packed, bias, out, Shape{rows, inputs / kGroup, outputs}); }); \
    }

extern "C" {

FOREBAY_LINEAR_Q(float, float, f32)
FOREBAY_LINEAR_Q(bf16, bf16, bf16)
FOREBAY_LINEAR_Q(bf16, float, bf16_f32)
FOREBAY_LINEAR_PANELS_Q(float, f32)
FOREBAY_LINEAR_PANELS_Q(bf16, bf16)
}

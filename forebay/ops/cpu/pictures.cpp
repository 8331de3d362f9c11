// Pictures: patches as rows of numbers, and rows of encodings instead of embeddings.
#include <cstdint>
#include <cstring>

#include "rows.h"

namespace {

// A patch's row of pixels, channels side by side, becomes a row of `size` numbers for each channel.
template <class T>
void patch_line(const uint8_t* pixels, const float* factor, const float* shift, T* out, long channels, long size) {
    for (long c = 0; c < channels; ++c) {
        const Vec by = set1(factor[c]), from = set1(shift[c]);
        T* to = out + c * size * size;
        for_each_vector(size, [&](long i, long part) {
            float values[W] = {};
            for (long j = 0; j < part; ++j) values[j] = static_cast<float>(pixels[(i + j) * channels + c]);
            store_part(to + i, load(values) * by + from, part);
        });
    }
}

template <class T>
void patch_rows(Pool& pool, const uint8_t* pixels, const float* factor, const float* shift, T* out, long height,
                long width, long channels, long size) {
    const long columns = width / size, patch = channels * size * size;
    pool.run(height / size * columns, grain_for(patch), [=](long begin, long end) {
        for (long p = begin; p < end; ++p) {
            const uint8_t* corner = pixels + (p / columns * size * width + p % columns * size) * channels;
            for (long y = 0; y < size; ++y) {
                patch_line(corner + y * width * channels, factor, shift, out + p * patch + y * size, channels, size);
            }
        }
    });
}

template <class T>
void mean_rows(Pool& pool, const T* x, T* out, long tokens, long count, long width) {
    const Vec share = set1(1.0f / static_cast<float>(count));
    pool.run(tokens, grain_for(count * width), [=](long begin, long end) {
        for (long token = begin; token < end; ++token) {
            const T* rows = x + token * count * width;
            for_each_vector(width, [&](long i, long part) {
                Vec total = load_part(rows + i, part);
                for (long row = 1; row < count; ++row) total = total + load_part(rows + row * width + i, part);
                store_part(out + token * width + i, total * share, part);
            });
        }
    });
}

template <class T>
void add_rows(Pool& pool, T* x, const T* table, long ldt, const int32_t* rows, long width, long count) {
    pool.run(count, grain_for(width), [=](long begin, long end) {
        for (long i = begin; i < end; ++i) {
            if (rows[i] == 0) continue;
            const T* from = table + rows[i] * ldt;
            T* to = x + i * width;
            for_each_vector(width, [&](long j, long part) {
                store_part(to + j, load_part(to + j, part) + load_part(from + j, part), part);
            });
        }
    });
}

}  // namespace

// pixels [height, width, channels] -> out [patches, channels * size * size]; x [tokens * count, width] -> out [tokens,
// width].
#define FOREBAY_PICTURES(T, suffix)                                                                               \
    void fb_patch_rows_##suffix(Pool* pool, const uint8_t* pixels, const float* factor, const float* shift, T* out, \
                                long height, long width, long channels, long size) {                              \
        pool->op([=](Pool& p) { patch_rows(p, pixels, factor, shift, out, height, width, channels, size); });     \
    }                                                                                                             \
    void fb_mean_rows_##suffix(Pool* pool, const T* x, T* out, long tokens, long count, long width) {             \
        pool->op([=](Pool& p) { mean_rows(p, x, out, tokens, count, width); });                                   \
    }

// x[i] += table[rows[i]] where rows[i] is not 0; the table's rows are ldt entries apart.
#define FOREBAY_ADD_ROWS(T, suffix)                                                                               \
    void fb_add_rows_##suffix(Pool* pool, T* x, const T* table, long ldt, const int32_t* rows, long width,         \
                              long count) {                                                                       \
        pool->op([=](Pool& p) { add_rows(p, x, table, ldt, rows, width, count); });                               \
    }

extern "C" {

FOREBAY_PICTURES(float, f32)
FOREBAY_PICTURES(bf16, bf16)
FOREBAY_ADD_ROWS(float, f32)
FOREBAY_ADD_ROWS(bf16, bf16)

// x[i] = table[rows[i]] where rows[i] is not 0; rows of row_bytes, those of the table table_bytes apart.
void fb_replace_rows(Pool* pool, char* x, const char* table, long table_bytes, const int32_t* rows, long row_bytes,
                     long count) {
    pool->op([=](Pool&) {
        for (long i = 0; i < count; ++i)
            if (rows[i] != 0) std::memcpy(x + i * row_bytes, table + rows[i] * table_bytes, row_bytes);
    });
}
}

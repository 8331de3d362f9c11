// Rows of tables that stay in their files, by the n-grams of tokens: see ops/reference/tables.py.
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#include "bf16.h"
#include "pool.h"
#include "rows.h"

namespace {

constexpr long kDigits = 3;
constexpr long kMostPast = 8;
constexpr long kPiece = 512;  // entries that are read at once

struct Hashes {
    const int64_t* multipliers;  // [past + 1]
    const int64_t* sizes;        // [heads]
    const int64_t* offsets;      // [heads]
    long past;
    long heads;
    int64_t end;
};

struct Table {
    const int64_t* places;  // [parts, 3]: descriptor, offset in bytes, dtype
    long part_rows;
    long width;
};

float half_value(uint16_t bits) {
    const int exponent = (bits >> 10) & 31, fraction = bits & 1023;
    const float sign = (bits & 0x8000) != 0 ? -1.0f : 1.0f;
    if (exponent == 31) return fraction != 0 ? NAN : sign * INFINITY;
    if (exponent == 0) return sign * std::ldexp(static_cast<float>(fraction), -24);
    return sign * std::ldexp(static_cast<float>(fraction + 1024), exponent - 25);
}

float value_at(const unsigned char* data, long i, int64_t dtype) {
    if (dtype == 0) {
        float value;
        std::memcpy(&value, data + 4 * i, 4);
        return value;
    }
    uint16_t bits;
    std::memcpy(&bits, data + 2 * i, 2);
    if (dtype == 2) return half_value(bits);
    const uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
}

bool read_all(int file, unsigned char* to, long size, long offset) {
    for (long done = 0; done < size;) {
        const ssize_t count = pread(file, to + done, size - done, offset + done);
        if (count <= 0) return false;
        done += count;
    }
    return true;
}

// A row that cannot be read is NaN: the request then fails as any with numbers that are not finite.
template <class T>
void read_row(const Table& table, int64_t row, T* out) {
    const int64_t* place = table.places + 3 * (row / table.part_rows);
    const long item = place[2] == 0 ? 4 : 2;
    const long begin = place[1] + (row % table.part_rows) * table.width * item;
    unsigned char data[4 * kPiece];
    for (long first = 0; first < table.width; first += kPiece) {
        const long count = std::min(kPiece, table.width - first);
        const bool there = read_all(static_cast<int>(place[0]), data, count * item, begin + first * item);
        float values[kPiece];
        for (long i = 0; i < count; ++i) values[i] = there ? value_at(data, i, place[2]) : NAN;
        for_each_vector(count, [&](long i, long part) FOREBAY_INLINE_LAMBDA {
            store_part(out + first + i, load_part(values + i, part), part);
        });
    }
}

// The ids of the tokens before, the nearest first; behind the end of a text there are only ends.
template <class T>
void ids_before(const Hashes& hashes, const T* before, int64_t* ids) {
    for (long i = 0; i < hashes.past; ++i) {
        int64_t next = 0;
        for (long d = kDigits; d-- > 0;) next = 256 * next + static_cast<int64_t>(to_float(before[i * kDigits + d]));
        ids[i] = next == 0 || (i > 0 && ids[i - 1] == hashes.end) ? hashes.end : next - 1;
    }
}

template <class T>
void ngram_rows(Pool& pool, const Hashes& hashes, const Table& table, const int64_t* ids, const T* before, T* out,
                long tokens) {
    const long per_order = hashes.heads / hashes.past;
    pool.run(tokens * hashes.past, 1, [&](long item, long stop) {
        for (; item < stop; ++item) {
            const long token = item / hashes.past, order = item % hashes.past;
            int64_t past[kMostPast];
            ids_before(hashes, before + token * hashes.past * kDigits, past);
            int64_t mixed = ids[token] * hashes.multipliers[0];
            for (long i = 0; i <= order; ++i) mixed ^= past[i] * hashes.multipliers[i + 1];
            for (long head = order * per_order; head < (order + 1) * per_order; ++head) {
                read_row(table, mixed % hashes.sizes[head] + hashes.offsets[head],
                         out + (token * hashes.heads + head) * table.width);
            }
        }
    });
}

}  // namespace

#define FOREBAY_TABLES(T, suffix)                                                                                     \
    extern "C" void fb_ngram_rows_##suffix(Pool* pool, const int64_t* ids, const T* before,                           \
                                           const int64_t* multipliers, const int64_t* sizes, const int64_t* offsets,  \
                                           const int64_t* places, T* out, long tokens, long past, long heads,         \
                                           long end, long part_rows, long width) {                                    \
        const Hashes hashes{multipliers, sizes, offsets, past, heads, end};                                           \
        const Table table{places, part_rows, width};                                                                  \
        pool->op([=](Pool& p) { ngram_rows(p, hashes, table, ids, before, out, tokens); });                           \
    }

FOREBAY_TABLES(float, f32)
FOREBAY_TABLES(bf16, bf16)

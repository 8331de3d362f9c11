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
constexpr long kPiece = 512;  // entries that are read at once: whole blocks of every type
constexpr long kMostBytes = 4 * kPiece;

struct Hashes {
    const int64_t* multipliers;  // [past + 1]
    const int64_t* sizes;        // [heads]
    const int64_t* offsets;      // [heads]
    long past;
    long heads;
    int64_t end;
};

struct Table {
    const int64_t* places;  // [parts, 3]: descriptor, offset in bytes, type as in GGUF files
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

// The numbers of types in GGUF files, and of those below with blocks of 32 entries how these are stored.
enum Type : int64_t {
    kF32 = 0, kF16 = 1, kQ4_0 = 2, kQ4_1 = 3, kQ5_0 = 6, kQ5_1 = 7, kQ8_0 = 8, kIq4Nl = 20, kBf16 = 30
};

constexpr long kBlock = 32;
constexpr float kIq4[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

// Bytes of 32 entries.
long block_bytes(int64_t type) {
    switch (type) {
        case kF32: return 4 * kBlock;
        case kQ4_0: case kIq4Nl: return 18;
        case kQ4_1: return 20;
        case kQ5_0: return 22;
        case kQ5_1: return 24;
        case kQ8_0: return 34;
        default: return 2 * kBlock;
    }
}

// Bytes of entries, of whole blocks if the type has blocks.
long bytes_of(int64_t type, long entries) { return entries * block_bytes(type) / kBlock; }

uint16_t word_at(const unsigned char* data) {
    uint16_t bits;
    std::memcpy(&bits, data, 2);
    return bits;
}

float wide_value(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

// Entry i of a block whose codes have 4 bits, the first 16 entries in the low ones.
int low_code(const unsigned char* codes, long i) { return i < kBlock / 2 ? codes[i] & 15 : codes[i - kBlock / 2] >> 4; }

// And of 5 bits, of which the fifth are in a word of their own.
int long_code(const unsigned char* fifths, long i) {
    return low_code(fifths + 4, i) | ((fifths[i / 8] >> (i % 8)) & 1) << 4;
}

float code_value(const unsigned char* block, long i, int64_t type) {
    const float scale = half_value(word_at(block));
    switch (type) {
        case kQ4_0: return scale * static_cast<float>(low_code(block + 2, i) - 8);
        case kQ4_1: return scale * static_cast<float>(low_code(block + 4, i)) + half_value(word_at(block + 2));
        case kQ5_0: return scale * static_cast<float>(long_code(block + 2, i) - 16);
        case kQ5_1: return scale * static_cast<float>(long_code(block + 4, i)) + half_value(word_at(block + 2));
        case kIq4Nl: return scale * kIq4[low_code(block + 2, i)];
        default: return scale * static_cast<float>(static_cast<signed char>(block[2 + i]));
    }
}

float value_at(const unsigned char* data, long i, int64_t type) {
    switch (type) {
        case kF32: {
            uint32_t bits;
            std::memcpy(&bits, data + 4 * i, 4);
            return wide_value(bits);
        }
        case kF16: return half_value(word_at(data + 2 * i));
        case kBf16: return wide_value(static_cast<uint32_t>(word_at(data + 2 * i)) << 16);
        default: return code_value(data + i / kBlock * block_bytes(type), i % kBlock, type);
    }
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
    const int64_t type = place[2];
    const long begin = place[1] + (row % table.part_rows) * bytes_of(type, table.width);
    unsigned char data[kMostBytes];
    for (long first = 0; first < table.width; first += kPiece) {
        const long count = std::min(kPiece, table.width - first);
        const long from = begin + bytes_of(type, first);
        const bool there = read_all(static_cast<int>(place[0]), data, bytes_of(type, count), from);
        float values[kPiece];
        for (long i = 0; i < count; ++i) values[i] = there ? value_at(data, i, type) : NAN;
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

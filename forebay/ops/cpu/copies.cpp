// Moving bytes between buffers whose addresses stay, so that a recorded step needs nothing else for it.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "pool.h"

namespace {

template <class T>
void fill(char* at, long count, uint64_t bits) {
    T* to = reinterpret_cast<T*>(at);
    std::fill_n(to, count, static_cast<T>(bits));
}

}  // namespace

extern "C" {

// `count` items of 1, 2, 4 or 8 bytes become the low bits of `bits`.
void fb_fill(Pool* pool, char* at, long count, long item_bytes, uint64_t bits) {
    pool->op([=](Pool&) {
        switch (item_bytes) {
            case 1: return fill<uint8_t>(at, count, bits);
            case 2: return fill<uint16_t>(at, count, bits);
            case 4: return fill<uint32_t>(at, count, bits);
            default: return fill<uint64_t>(at, count, bits);
        }
    });
}

// Rows of row_bytes, ld_to and ld_from bytes apart.
void fb_copy_rows(Pool* pool, char* to, long ld_to, const char* from, long ld_from, long row_bytes, long rows) {
    pool->op([=](Pool& p) {
        p.run(rows, std::max(1L, 65536 / std::max(1L, row_bytes)), [=](long begin, long end) {
            for (long r = begin; r < end; ++r) std::memcpy(to + r * ld_to, from + r * ld_from, row_bytes);
        });
    });
}
}

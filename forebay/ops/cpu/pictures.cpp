// Pictures in a step: rows of encodings instead of embeddings.
#include <cstdint>
#include <cstring>

#include "pool.h"

extern "C" {

// x[i] = table[rows[i]] where rows[i] is not 0, rows of row_bytes.
void fb_replace_rows(Pool* pool, char* x, const char* table, const int32_t* rows, long row_bytes, long count) {
    pool->op([=](Pool&) {
        for (long i = 0; i < count; ++i)
            if (rows[i] != 0) std::memcpy(x + i * row_bytes, table + rows[i] * row_bytes, row_bytes);
    });
}
}

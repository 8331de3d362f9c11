// Quantized weights from the rows of a file to panels, and single rows of them back to numbers.
#if defined(FOREBAY_AMX)

#include <bit>

#include "linear_q.h"
#include "rows.h"

namespace {

// codes [outputs][groups][16 or 32 bytes] as a file has them: with 4 bits byte j is input j and, above, input j + 16.
template <class C>
void pack_panel(const uint8_t* codes, const uint16_t* scales, const uint16_t* minimums, uint8_t* panel, long first,
                long outputs, long groups) {
    constexpr long kRowBytes = kGroup * C::kBits / 8;
    std::memset(panel, 0, groups * C::kBlock);
    for (long n = 0; n < std::min(kPanel, outputs - first); ++n) {
        for (long g = 0; g < groups; ++g) {
            const long at = (first + n) * groups + g;
            const uint8_t* row = codes + at * kRowBytes;
            const auto code = [row](long k) -> uint32_t {
                return C::kBits == 8 ? row[k] : row[k % kRowBytes] >> (k / kRowBytes * 4) & 15;
            };
            uint8_t* block = panel + g * C::kBlock;
            for (long w = 0; w < C::kWords; ++w) {
                for (long odd = 0; odd < 2; ++odd) {
                    uint32_t word = 0;
                    for (long pair = 0; pair < C::kPairs; ++pair) {
                        word |= code(2 * (w * C::kPairs + pair) + odd) << (pair * C::kBits);
                    }
                    word = std::rotl(word, kRotation);
                    std::memcpy(block + n / kHalf * C::kHalfCodes + (w * kLanes + n % kHalf * 2 + odd) * 4, &word, 4);
                }
            }
            std::memcpy(block + C::kScalesAt + n * 2, scales + at, 2);
            if constexpr (C::kMinimums) std::memcpy(block + C::kMinimumsAt + n * 2, minimums + at, 2);
        }
    }
}

template <class C, class T>
void open_row(const uint8_t* panel, long n, long groups, float zero, T* out) {
    float lanes[kGroup / 2][kLanes];
    for (long g = 0; g < groups; ++g, panel += C::kBlock, out += kGroup) {
        open_half<C>(panel, n / kHalf, zero, &lanes[0][0]);
        float row[kGroup];
        for (long k = 0; k < kGroup; ++k) row[k] = lanes[k / 2][n % kHalf * 2 + k % 2];
        for (long k = 0; k < kGroup; k += W) store(out + k, load(row + k));
    }
}

template <class T>
void embedding(Pool& pool, const int64_t* ids, const uint8_t* packed, T* out, long rows, long width) {
    const long groups = width / kGroup;
    const CodeHeader& header = header_of(packed);
    with_codes(header, [&](auto codes) {
        using C = decltype(codes);
        pool.run(rows, grain_for(16 * width), [&](long begin, long end) {
            for (long r = begin; r < end; ++r) {
                open_row<C>(packed + kHeaderBytes + ids[r] / kPanel * groups * C::kBlock, ids[r] % kPanel, groups,
                            static_cast<float>(header.zero), out + r * width);
            }
        });
    });
}

}  // namespace

extern "C" {

// codes [outputs, inputs * bits / 8], scales and minimums (or null) float16 [outputs, inputs / 32], contiguous;
// `packed` as linear_q.h says, all of it written.
void fb_pack_q(Pool* pool, const uint8_t* codes, const uint16_t* scales, const uint16_t* minimums, uint8_t* packed,
               long outputs, long inputs, long bits, long zero, long) {
    const CodeHeader header{static_cast<int32_t>(bits), static_cast<int32_t>(zero), minimums != nullptr, 0};
    std::memset(packed, 0, kHeaderBytes);
    std::memcpy(packed, &header, sizeof header);
    const long groups = inputs / kGroup;
    with_codes(header, [=](auto format) {
        using C = decltype(format);
        pool->run(ceil_div(outputs, kPanel), [=](long begin, long end) {
            for (long panel = begin; panel < end; ++panel) {
                pack_panel<C>(codes, scales, minimums, packed + kHeaderBytes + panel * groups * C::kBlock,
                              panel * kPanel, outputs, groups);
            }
        });
    });
}

// ids [rows] in 0..outputs; out [rows, width], width the weight's inputs.
#define FOREBAY_EMBEDDING_Q(T, suffix)                                                                     \
    void fb_embedding_q_##suffix(Pool* pool, const int64_t* ids, const uint8_t* packed, T* out, long rows, \
                                 long width) {                                                             \
        pool->op([=](Pool& p) { embedding(p, ids, packed, out, rows, width); });                           \
    }

FOREBAY_EMBEDDING_Q(float, f32)
FOREBAY_EMBEDDING_Q(bf16, bf16)
}

#endif

// Quantized weights from the rows of a file to what is multiplied as integers, and single rows of them back to numbers.
#if !defined(FOREBAY_AMX)

#include "codes.h"
#include "rows.h"

namespace {

// codes [outputs][groups][16 or 32 bytes] as a file has them: with 4 bits byte j is input j and, above, input j + 16.
template <class C>
void pack_half(const uint8_t* codes, const uint16_t* scales, const uint16_t* minimums, uint8_t* half, long first,
               long outputs, long groups) {
    constexpr long kRowBytes = kGroup * C::kBits / 8;
    std::memset(half, 0, groups * C::kBlock);
    for (long n = 0; n < std::min(kHalf, outputs - first); ++n) {
        for (long g = 0; g < groups; ++g) {
            const long at = (first + n) * groups + g;
            const uint8_t* row = codes + at * kRowBytes;
            uint8_t* block = half + g * C::kBlock;
            for (long k = 0; k < kGroup; ++k) {
                if constexpr (C::kBits == 8) {
                    block[k / 4 * kLine + n * 4 + k % 4] = row[k];
                } else {
                    const int code = row[k % kRowBytes] >> (k / kRowBytes * 4) & 15;
                    block[k / 8 * kLine + n * 4 + k % 4] |= code << (k / 4 % 2 * 4);
                }
            }
            std::memcpy(block + C::kScalesAt + n * 2, scales + at, 2);
            if constexpr (C::kMinimums) std::memcpy(block + C::kMinimumsAt + n * 2, minimums + at, 2);
        }
    }
}

// The numbers of output n of half a panel.
template <class C, class T>
void open_row(const uint8_t* block, long n, long inputs, T* out) {
    const long lane = n / W * W;
    for (long k = 0; k < inputs; block += C::kBlock) {
        for (long group = 0; group < C::kGroups; ++group, k += kGroup) {
            float row[kGroup];
            unrolled<C::kParts>([&](auto part) FOREBAY_INLINE_LAMBDA {
                float scales[W], minimums[W] = {};
                store(scales, C::scale(block, group, part, lane));
                if constexpr (C::kMinimums) store(minimums, C::minimum(block, group, part, lane));
                C::for_each_four(block, group, part, lane, [&](int four, Ints codes) {
                    uint8_t lanes[W][4];
                    store_ints(lanes, codes);
                    for (int i = 0; i < 4; ++i) {
                        const auto code = static_cast<float>(lanes[n % W][i] - C::kZero);
                        row[four * 4 + i] = scales[n % W] * code + minimums[n % W];
                    }
                });
            });
            for (long i = 0; i < kGroup; i += W) store(out + k + i, load(row + i));
        }
    }
}

template <class T>
void embedding(Pool& pool, const int64_t* ids, const uint8_t* packed, T* out, long rows, long width) {
    with_codes(header_of(packed), [&](auto codes) {
        using C = decltype(codes);
        pool.run(rows, grain_for(16 * width), [&](long begin, long end) {
            for (long r = begin; r < end; ++r) {
                const uint8_t* half = packed + kHeaderBytes + ids[r] / kHalf * half_bytes<C>(width);
                open_row<C>(half, ids[r] % kHalf, width, out + r * width);
            }
        });
    });
}

}  // namespace

extern "C" {

// codes [outputs, inputs * bits / 8], scales and minimums (or null) float16 [outputs, inputs / 32], contiguous;
// `packed` as codes.h says, all of it written.
void fb_pack_q(Pool* pool, const uint8_t* codes, const uint16_t* scales, const uint16_t* minimums, uint8_t* packed,
               long outputs, long inputs, long bits, long zero, long activation_bits) {
    const CodeHeader header{static_cast<int32_t>(bits), static_cast<int32_t>(zero), minimums != nullptr,
                            static_cast<int32_t>(activation_bits)};
    std::memset(packed, 0, kHeaderBytes);
    std::memcpy(packed, &header, sizeof header);
    with_codes(header, [=](auto format) {
        using C = decltype(format);
        pool->run(ceil_div(outputs, kPanel) * 2, [=](long begin, long end) {
            for (long half = begin; half < end; ++half) {
                pack_half<C>(codes, scales, minimums, packed + kHeaderBytes + half * half_bytes<C>(inputs),
                             half * kHalf, outputs, inputs / kGroup);
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

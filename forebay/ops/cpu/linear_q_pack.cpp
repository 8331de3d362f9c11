// Quantized weights from the rows of a file to panels, and single rows of them back to numbers.
#include "linear_q.h"
#include "rows.h"

namespace {

// codes [outputs][groups][16 or 32 bytes] as a file has them.
template <class C>
void pack_panel(const uint8_t* codes, const uint16_t* scales, const uint16_t* minimums, uint8_t* panel, long first,
                long outputs, long groups, int32_t zero) {
    constexpr long kRowBytes = kGroup * C::kBits / 8;
    std::memset(panel, 0, groups * C::kBlock);
    for (long n = 0; n < std::min(kPanel, outputs - first); ++n) {
        for (long g = 0; g < groups; ++g) {
            const long at = (first + n) * groups + g;
            const uint8_t* row = codes + at * kRowBytes;
            uint8_t* block = panel + g * C::kBlock;
            uint8_t* column = block + n / kHalf * C::kHalfCodes + n % kHalf * 4;
            for (long i = 0; i < kRowBytes; ++i) {
                const int code = C::kBits == 4 ? row[i] : row[i] - zero;
                column[i / 4 * 64 + i % 4] = static_cast<uint8_t>(code);
            }
            std::memcpy(block + C::kScalesAt + n * 2, scales + at, 2);
            if constexpr (C::kMinimums) std::memcpy(block + C::kMinimumsAt + n * 2, minimums + at, 2);
        }
    }
}

inline float half_at(const uint8_t* p) {
    uint16_t bits;
    std::memcpy(&bits, p, sizeof bits);
    return _cvtsh_ss(bits);
}

template <class C>
void unpack_row(const uint8_t* panel, long n, long groups, int32_t zero, float* out) {
    for (long g = 0; g < groups; ++g, panel += C::kBlock, out += kGroup) {
        const uint8_t* column = panel + n / kHalf * C::kHalfCodes + n % kHalf * 4;
        const float scale = half_at(panel + C::kScalesAt + n * 2);
        const float minimum = C::kMinimums ? half_at(panel + C::kMinimumsAt + n * 2) : 0.0f;
        for (long i = 0; i < kGroup; ++i) {
            int code;
            if constexpr (C::kBits == 4) {
                code = (column[i % 16 / 4 * 64 + i % 4] >> (i / 16 * 4) & 15) - zero;
            } else {
                code = static_cast<int8_t>(column[i / 4 * 64 + i % 4]);
            }
            out[i] = scale * static_cast<float>(code) + minimum;
        }
    }
}

template <class T>
void embedding(Pool& pool, const int64_t* ids, const uint8_t* packed, T* out, long rows, long width) {
    const long groups = width / kGroup;
    with_codes(header_of(packed), [&](auto codes) {
        using C = decltype(codes);
        pool.run(rows, grain_for(4 * width), [&](long begin, long end) {
            auto* row = static_cast<float*>(thread_scratch(width * 4));
            for (long r = begin; r < end; ++r) {
                unpack_row<C>(packed + kHeaderBytes + ids[r] / kPanel * groups * C::kBlock, ids[r] % kPanel, groups,
                              header_of(packed).zero, row);
                for_each_vector(width, [&](long i, long part) {
                    store_part(out + r * width + i, load_part(row + i, part), part);
                });
            }
        });
    });
}

}  // namespace

extern "C" {

// codes [outputs, inputs * bits / 8], scales and minimums (or null) float16 [outputs, inputs / 32], contiguous; `packed`
// as linear_q.h says, all of it written. Codes of 8 bits less `zero` fit into int8.
void fb_pack_q(Pool* pool, const uint8_t* codes, const uint16_t* scales, const uint16_t* minimums, uint8_t* packed,
               long outputs, long inputs, long bits, long zero) {
    const CodeHeader header{static_cast<int32_t>(bits), static_cast<int32_t>(zero), minimums != nullptr};
    std::memset(packed, 0, kHeaderBytes);
    std::memcpy(packed, &header, sizeof header);
    const long groups = inputs / kGroup;
    with_codes(header, [=](auto format) {
        using C = decltype(format);
        pool->run(ceil_div(outputs, kPanel), [=](long begin, long end) {
            for (long panel = begin; panel < end; ++panel) {
                pack_panel<C>(codes, scales, minimums, packed + kHeaderBytes + panel * groups * C::kBlock,
                              panel * kPanel, outputs, groups, header.zero);
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

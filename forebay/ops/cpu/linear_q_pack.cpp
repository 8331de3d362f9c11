// Quantized weights from one code a byte to panels (codes.h), and single rows of them back to numbers.
#include <bit>

#include "rows.h"
#if defined(FOREBAY_AMX)
#include "linear_q.h"
#else
#include "linear_int.h"
#endif

namespace {

// Rows of one format: what fb_pack_q is given.
struct Rows {
    const uint8_t* codes;
    const uint8_t* scales;
    const uint16_t* minimums;
    const uint8_t* factors;
    const uint8_t* minimum_factors;
    long inputs;
};

#if defined(FOREBAY_AMX)

// The bits `shift`.. of the 32 codes of output n, BITS of each, to where they are in a plane of 16 outputs.
template <int BITS>
void pack_plane(const uint8_t* codes, int shift, uint8_t* plane, long n) {
    constexpr long kPairs = std::min(kGroup / 2, 32L / BITS);
    for (long k = 0; k < kGroup; k += 2 * kPairs) {
        for (long odd = 0; odd < 2; ++odd) {
            uint32_t word = 0;
            for (long pair = 0; pair < kPairs; ++pair) {
                word |= (codes[k + 2 * pair + odd] >> shift & ((1u << BITS) - 1)) << (pair * BITS);
            }
            const long lane = k / (2 * kPairs) * kLanes + n * 2 + odd;
            if constexpr (BITS == 1) {
                std::memcpy(plane + lane * 2, &word, 2);
            } else {
                word = std::rotl(word, kRotation + shift);
                std::memcpy(plane + lane * 4, &word, 4);
            }
        }
    }
}

template <class C, class T>
void open_row(const uint8_t* panel, const CodePart& part, long n, long inputs, T* out) {
    float lanes[kGroup / 2][kLanes];
    Blocks<C> blocks(panel, part.blocks);
    for (long k = 0; k < inputs; k += kGroup) {
        open_half<C>(blocks.next(), n / kHalf, &lanes[0][0]);
        float row[kGroup];
        for (long i = 0; i < kGroup; ++i) row[i] = lanes[i / 2][n % kHalf * 2 + i % 2];
        for (long i = 0; i < kGroup; i += W) store(out + k + i, load(row + i));
    }
}

#else

template <int BITS>
void pack_plane(const uint8_t* codes, int shift, uint8_t* plane, long n) {
    constexpr uint32_t kMask = ((1u << BITS) - 1) * 0x01010101u;
    for (long line = 0; line < BITS; ++line) {
        uint32_t word = 0;
        for (int at = 0; at < 8; at += BITS, codes += 4) {
            uint32_t four;
            std::memcpy(&four, codes, 4);
            word |= (four >> shift & kMask) << at;
        }
        std::memcpy(plane + line * kLine + n * 4, &word, 4);
    }
}

// What a code, or an entry of a table, stands for.
template <class C>
float number_of(uint8_t code) {
    if constexpr (C::kFloats) {
        return std::bit_cast<float>((code & 0x80u) << 24 | (code & 0x7fu) << 20) * 0x1p120f;  // as from_e4m3
    }
    return static_cast<float>(code - C::kZero);
}

template <class C, class T>
void open_row(const uint8_t* panel, const CodePart& part, long n, long inputs, T* out) {
    constexpr int kFours = 8 / C::kParts;
    const long lane = n % kStripe / W * W, at = n % W;
    Blocks<C> blocks(panel + n / kStripe * part.panel_bytes / 2, part.blocks);
    for (long k = 0; k < inputs; k += kGroup) {
        const Block block = blocks.next();
        float row[kGroup];
        unrolled<8>([&](auto four) {
            const PartScales<C> of(block, four / kFours, lane);
            float scales[W], minimums[W];
            uint8_t codes[W][4];
            store(scales, of.scale);
            store(minimums, of.minimum);
            store_ints(codes, four_codes<C, four>(block, lane));
            for (int i = 0; i < 4; ++i) {
                row[four * 4 + i] = scales[at] * number_of<C>(codes[at][i]) + minimums[at];
            }
        });
        for (long i = 0; i < kGroup; i += W) store(out + k + i, load(row + i));
    }
}

#endif

template <class C>
void pack_block(const Rows& rows, long row, long block, uint8_t* to, long n) {
    const uint8_t* codes = rows.codes + row * rows.inputs + block * kGroup;
    uint8_t* half = to + n / kHalf * C::kHalfBytes;
    pack_plane<C::kLow>(codes, 0, half, n % kHalf);
    if constexpr (C::kHigh > 0) pack_plane<C::kHigh>(codes, C::kLow, half + C::kLowBytes, n % kHalf);
    if constexpr (C::kFactors) {
        const long first = (row * (rows.inputs / kGroup) + block) * C::kParts;
        for (long i = 0; i < C::kParts; ++i) {
            uint8_t factor = rows.factors[first + i];
            if constexpr (C::kShared) factor |= rows.minimum_factors[first + i] << 4;
            to[C::kFactorsAt + i * kStripe + n] = factor;
            if constexpr (C::kMinimums && !C::kShared) {
                to[C::kMinimumFactorsAt + i * kStripe + n] = rows.minimum_factors[first + i];
            }
        }
    }
}

// Rows first.. into a stripe, block by block: both what is read and what is written then stay in the first-level cache.
template <class C>
void pack_stripe(const Rows& rows, long first, long count, const CodePart& part, uint8_t* stripe) {
    const long heads = rows.inputs / kGroup / part.blocks, head_bytes = C::kHead + part.blocks * C::kBlock;
    const long present = std::clamp(count - first, 0L, kStripe);
    if (present < kStripe) std::memset(stripe, 0, heads * head_bytes);
    for (long h = 0; h < heads; ++h) {
        uint8_t* head = stripe + h * head_bytes;
        for (long n = 0; n < present; ++n) {
            const long from = (first + n) * heads + h;
            std::memcpy(head + n * C::kScaleBytes, rows.scales + from * C::kScaleBytes, C::kScaleBytes);
            if constexpr (C::kMinimums) {
                std::memcpy(head + kStripe * C::kScaleBytes + n * 2, rows.minimums + from, 2);
            }
        }
        for (long b = 0; b < part.blocks; ++b) {
            for (long n = 0; n < present; ++n) {
                pack_block<C>(rows, first + n, h * part.blocks + b, head + C::kHead + b * C::kBlock, n);
            }
        }
    }
}

template <class T>
void embedding(Pool& pool, const int64_t* ids, const uint8_t* packed, T* out, long rows, long width) {
    pool.run(rows, grain_for(16 * width), [&](long begin, long end) {
        for (long r = begin; r < end; ++r) {
            with_panel(packed, ids[r] / kPanel, [&](auto codes, const CodePart& part, const uint8_t* panel) {
                open_row<decltype(codes)>(panel, part, ids[r] % kPanel, width, out + r * width);
            });
        }
    });
}

}  // namespace

extern "C" {

// The number of a format in a `CodePart`.
long fb_code_format(long bits, long minimums, long factors, long levels, long scales) {
    return AllCodes::find(bits, minimums != 0, factors, Levels{levels}, Scales{scales});
}

// Some rows of a part, from a panel's first on: codes [rows, inputs], scales and minimums [rows, inputs / 32 /
// part.blocks] in the types of the format, factors of both [rows, inputs / inputs that share one], null where there are
// none; `panels` as codes.h says, all of them written.
void fb_pack_q(Pool* pool, const uint8_t* codes, const uint8_t* scales, const uint16_t* minimums,
               const uint8_t* factors, const uint8_t* minimum_factors, const void* part_of_header, uint8_t* panels,
               long rows, long inputs) {
    const auto& part = *static_cast<const CodePart*>(part_of_header);
    const Rows all{codes, scales, minimums, factors, minimum_factors, inputs};
    constexpr long kStripes = kPanel / kStripe;
    AllCodes::with(part.format, [&](auto format) {
        pool->run(ceil_div(rows, kPanel) * kStripes, [&](long begin, long end) {
            for (long stripe = begin; stripe < end; ++stripe) {
                pack_stripe<decltype(format)>(all, stripe * kStripe, rows, part,
                                              panels + stripe * part.panel_bytes / kStripes);
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

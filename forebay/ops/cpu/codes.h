// Quantized weights that are multiplied as integers (linear_int.cpp): their formats, and how they are packed.
//
// A weight [N, K] lies in panels of 32 outputs (linear.h), each of two halves of 16 outputs, contiguous and in the order
// they are read: [ceil(N/32)][2][blocks of K][C::kBlock bytes], behind a header of one cache line. Outputs beyond N are
// zero.
//
// A format is a type C. Its block is 16 outputs by 32 * kGroups inputs; a group of 32 has kParts equal parts, each with a
// scale of its own: a weight is scale * (code - kZero) + minimum.
//   kBits      of a code, an unsigned number
//   kZero      0 or a power of two
//   kMinimums  whether there are any
//   for_each_four(block, group, part, lane, body)   body(four, codes) for inputs 4 * four.. of the group, those of the part
//              in ascending order: every 32-bit lane has the codes of one output, an input in each byte
//   scale(block, group, part, lane), minimum(block, group, part, lane)   float32, of an output in each lane
// `lane` is the first of the W outputs in question, a multiple of W under 16.
#pragma once

#include <bit>

#include "ints.h"
#include "linear.h"

constexpr long kHalf = 16;         // outputs
constexpr long kLine = kHalf * 4;  // bytes: 16 outputs by 4 inputs of 8 bits, or 8 of 4

// Groups of 32 with a float16 scale each. A block is
//   codes     [BITS][16][4] bytes; with 8 bits line i has inputs 4 * i.., with 4 bits inputs 8 * i.. below 8 * i + 4..
//   scales    float16 [16]
//   minimums  float16 [16], where there are any
template <int BITS, int ZERO, bool MINIMUMS>
struct GroupCodes {
    static constexpr int kBits = BITS;
    static constexpr int kZero = ZERO;
    static constexpr bool kMinimums = MINIMUMS;
    static constexpr long kGroups = 1;
    static constexpr int kParts = 1;
    static constexpr long kScalesAt = BITS * kLine;
    static constexpr long kMinimumsAt = kScalesAt + kHalf * 2;
    static constexpr long kBlock = kMinimumsAt + (MINIMUMS ? kHalf * 2 : 0);

    template <class Body>
    FOREBAY_INLINE static void for_each_four(const uint8_t* block, long, long, long lane, Body&& body) {
        unrolled<BITS>([&](auto i) FOREBAY_INLINE_LAMBDA {
            const Ints line = load_ints(block + i * kLine + lane * 4);
            if constexpr (BITS == 8) {
                body(i, line);
            } else {
                const Ints mask = set1_int(0x0f0f0f0f);
                body(2 * i, line & mask);
                body(2 * i + 1, shift_right<4>(line) & mask);
            }
        });
    }
    FOREBAY_INLINE static Vec scale(const uint8_t* block, long, long, long lane) {
        return load_float16(block + kScalesAt + lane * 2);
    }
    FOREBAY_INLINE static Vec minimum(const uint8_t* block, long, long, long lane) {
        return load_float16(block + kMinimumsAt + lane * 2);
    }
};

// Calls body(C{}) for the format that `header` names.
template <class Body>
auto with_codes(const CodeHeader& header, const Body& body) {
    if (header.bits == 4 && header.minimums) return body(GroupCodes<4, 0, true>{});
    if (header.bits == 4) return body(GroupCodes<4, 8, false>{});
    return header.minimums ? body(GroupCodes<8, 128, true>{}) : body(GroupCodes<8, 128, false>{});
}

// Bytes of one half of a panel.
template <class C>
constexpr long half_bytes(long inputs) {
    return inputs / (kGroup * C::kGroups) * C::kBlock;
}

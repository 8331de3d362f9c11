// Codes (codes.h) as they are multiplied with integers, four inputs of an output in every 32-bit lane, a byte each.
//
// A plane of b bits of 16 outputs' codes is [b lines][16 outputs][4] bytes: byte i of an output has inputs 4 * four + i, for
// 8 / b fours one above the other.
#pragma once

#include "codes.h"
#include "ints.h"

constexpr long kLine = kHalf * 4;  // bytes

// What codes of formats with levels stand for, kZero added.
alignas(16) constexpr uint8_t kIq4[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
alignas(16) constexpr uint8_t kE2m1[16] = {16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4};

// The fields of BITS bits of a plane that are those of inputs 4 * FOUR.., at bit TO of every byte.
template <int BITS, int FOUR, int TO>
FOREBAY_INLINE Ints fields(const uint8_t* plane, long lane) {
    constexpr int kAt = FOUR * BITS % 8;
    constexpr unsigned kMask = (((1u << BITS) - 1) << TO) * 0x01010101u;
    const Ints line = load_ints(plane + FOUR * BITS / 8 * kLine + lane * 4);
    if constexpr (kAt < TO) {
        return shift_left<TO - kAt>(line) & set1_int(kMask);
    } else if constexpr (kAt > TO) {
        return shift_right<kAt - TO>(line) & set1_int(kMask);
    } else {
        return BITS == 8 ? line : line & set1_int(kMask);
    }
}

// What the codes of inputs 4 * FOUR.. of a block stand for, of outputs lane.., a multiple of W under 16.
template <class C, int FOUR>
FOREBAY_INLINE Ints four_codes(const Block& block, long lane) {
    Ints codes = fields<C::kLow, FOUR, 0>(block.codes, lane);
    if constexpr (C::kHigh > 0) codes = codes | fields<C::kHigh, FOUR, C::kLow>(block.codes + C::kLowBytes, lane);
    if constexpr (C::kLevels) codes = entries(C::kTable == Levels::kIq4 ? kIq4 : kE2m1, codes);
    return codes;
}

// The scales of W outputs of a stripe, from output `lane` on.
template <class C>
FOREBAY_INLINE Vec load_scales(const uint8_t* head, long lane) {
    if constexpr (C::kScales == Scales::kE8m0) {
        // Half of 2^(e - 127), whose least is no normal number.
        const Ints exponents = bytes_to_ints(head + lane) & set1_int(0xff);
        return as_float(max(shift_left<23>(exponents), set1_int(0x00400000))) * set1(0.5f);
    } else if constexpr (C::kScales == Scales::kFloat32) {
        return as_float(load_ints(head + lane * 4));
    } else {
        return load_float16(head + lane * 2);
    }
}

// The numbers of E4M3 codes in the highest byte of each lane: sign and magnitude are moved to where a float32 has them,
// whose exponent is then 120 too low. So is that of what is no normal number.
FOREBAY_INLINE Vec from_e4m3(Ints x) {
    return as_float(shift_right_signed<4>(x) & set1_int(static_cast<int32_t>(0x87f00000))) * set1(0x1p120f);
}

// The scales and minimums of these outputs, and of the inputs of PART.
template <class C>
struct PartScales {
    Vec scale, minimum;

    FOREBAY_INLINE PartScales(const Block& block, long part, long lane)
        : scale(load_scales<C>(block.head, lane)), minimum(zero()) {
        if constexpr (C::kMinimums) minimum = load_float16(block.head + kHalf * C::kScaleBytes + lane * 2);
        if constexpr (C::kShared) {
            const Ints both = bytes_to_ints(block.codes + C::kFactorsAt + part * kHalf + lane);
            scale = scale * to_float(both & set1_int(15));
            minimum = minimum * to_float(shift_right<4>(both) & set1_int(15));
        } else if constexpr (C::kFactors && C::kScales == Scales::kFloat32) {
            scale = scale * from_e4m3(shift_left<24>(bytes_to_ints(block.codes + C::kFactorsAt + part * kHalf + lane)));
        } else if constexpr (C::kFactors) {
            scale = scale * to_float(bytes_to_ints(block.codes + C::kFactorsAt + part * kHalf + lane));
            if constexpr (C::kMinimums) {
                minimum = minimum * to_float(bytes_to_ints(block.codes + C::kMinimumFactorsAt + part * kHalf + lane));
            }
        }
    }
};

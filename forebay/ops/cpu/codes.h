// Weights that are held in codes: their formats, and how they are packed.
//
// A weight [N, K] lies in panels of 32 outputs (linear.h), each of one format (CodeFormat of formats/quantized.py): a weight
// is scale * factor * (code - kZero) + minimum * its factor, where a code may stand for a number of a table, or a float.
// Panels of one format are a part; all parts are listed in the header. Outputs beyond N are zero. With AMX a panel is one stripe of 32 outputs, else two of 16, one behind the other. A
// stripe is contiguous and in the order it is read, for each run of inputs that share scales:
//   scales    float16, float32 or E8M0 [outputs]
//   minimums  float16 [outputs], where there are any
//   then a block for each 32 inputs:
//     codes            for each 16 outputs the lower kLow bits of the codes, then the others (linear_q.h, linear_int.h)
//     factors          int8, or E4M3 beside scales in float32, [kParts][outputs]
//     minimum factors  the same; where codes have two bits both are in one byte, four bits each
#pragma once

#include <cstdint>
#include <utility>

#include "linear.h"

constexpr long kHalf = 16;  // outputs
#if defined(FOREBAY_AMX)
constexpr long kStripe = kPanel;
#else
constexpr long kStripe = kHalf;
#endif

// The panels from `first_panel` on: where they begin, the bytes of each, their format, and how many blocks share scales.
struct CodePart {
    int64_t first_panel, offset, panel_bytes, format, blocks;
};

struct CodeHeader {
    int64_t activation_bits;  // that inputs are rounded to (rounded.h), 0 where they stay as they are
    int64_t num_parts;
    CodePart parts[];
};

inline const CodeHeader& header_of(const void* packed) { return *static_cast<const CodeHeader*>(packed); }

// `Levels` and `ScaleType` of formats/quantized.py.
enum class Levels : long { kNone = 0, kIq4 = 1, kE2m1 = 2, kE4m3 = 3 };
enum class Scales : long { kFloat16 = 0, kE8m0 = 1, kFloat32 = 2 };

// Codes of LOW + HIGH bits; FACTORS inputs share a factor, 0 for none; LEVELS says what a code is the number of.
template <int LOW, int HIGH, bool MINIMUMS, int FACTORS = 0, Levels LEVELS = Levels::kNone,
          Scales SCALES = Scales::kFloat16>
struct Codes {
    static constexpr int kLow = LOW;
    static constexpr int kHigh = HIGH;
    static constexpr bool kMinimums = MINIMUMS;
    static constexpr bool kFloats = LEVELS == Levels::kE4m3;  // and no whole numbers
    static constexpr bool kLevels = LEVELS != Levels::kNone && !kFloats;
    static constexpr Levels kTable = LEVELS;
    static constexpr Scales kScales = SCALES;
    static constexpr long kScaleBytes = SCALES == Scales::kFloat16 ? 2 : SCALES == Scales::kE8m0 ? 1 : 4;
    static constexpr bool kFactors = FACTORS > 0;
    static constexpr bool kShared = LOW + HIGH == 2;        // a byte by both factors
    static constexpr int kBits = LEVELS == Levels::kE2m1 ? 5 : kLevels ? 8 : LOW + HIGH;  // of what codes stand for
    static constexpr int kZero = kFloats || (kBits < 8 && MINIMUMS) ? 0 : 1 << (kBits - 1);
    static constexpr int kParts = FACTORS == 16 ? 2 : 1;  // of a block's inputs, with scales of their own
    static constexpr long kLowBytes = kHalf * kGroup * LOW / 8;
    static constexpr long kHalfBytes = kLowBytes + kHalf * kGroup * HIGH / 8;
    static constexpr long kHead = kStripe * (kScaleBytes + 2 * MINIMUMS);
    static constexpr long kFactorsAt = kStripe / kHalf * kHalfBytes;
    static constexpr long kFactorBytes = kFactors ? kParts * kStripe : 0;
    static constexpr long kMinimumFactorsAt = kFactorsAt + (kShared ? 0 : kFactorBytes);
    static constexpr long kBlock = kFactorsAt + kFactorBytes * (1 + (MINIMUMS && !kShared));

    static bool is(long bits, bool minimums, long factors, Levels levels, Scales scales) {
        return bits == LOW + HIGH && minimums == MINIMUMS && factors == FACTORS && levels == LEVELS && scales == SCALES;
    }
};

template <class... C>
struct CodeList {
    // The number of a format, -1 where there is none.
    static long find(long bits, bool minimums, long factors, Levels levels, Scales scales) {
        long number = 0;
        const bool found = ((C::is(bits, minimums, factors, levels, scales) || (++number, false)) || ...);
        return found ? number : -1;
    }
    // Calls body(Codes) of a format.
    template <class Body>
    static void with(long format, const Body& body) {
        long number = 0;
        static_cast<void>(((format == number++ && (body(C{}), true)) || ...));
    }
};

using AllCodes = CodeList<Codes<4, 0, false>,                                     // Q4_0
                          Codes<4, 0, true>,                                      // Q4_1
                          Codes<8, 0, false>,                                     // Q8_0
                          Codes<8, 0, true>,                                      // of 8 bits with zero points
                          Codes<4, 1, false>,                                     // Q5_0
                          Codes<4, 1, true>,                                      // Q5_1
                          Codes<4, 0, false, 0, Levels::kIq4>,                    // IQ4_NL
                          Codes<2, 0, true, 16>,                                  // Q2_K
                          Codes<2, 1, false, 16>,                                 // Q3_K
                          Codes<4, 0, true, 32>,                                  // Q4_K
                          Codes<4, 1, true, 32>,                                  // Q5_K
                          Codes<4, 2, false, 16>,                                 // Q6_K
                          Codes<4, 0, false, 32, Levels::kIq4>,                   // IQ4_XS
                          Codes<4, 0, false, 0, Levels::kE2m1, Scales::kE8m0>,    // MXFP4
                          Codes<8, 0, false, 0, Levels::kE4m3, Scales::kFloat32>,  // FP8
                          Codes<4, 0, false, 16, Levels::kE2m1, Scales::kFloat32>>;  // NVFP4

// Where a block's scales are, and its codes.
struct Block {
    const uint8_t* head;
    const uint8_t* codes;
};

// The blocks of a stripe, one after the other.
template <class C>
class Blocks {
  public:
    Blocks(const uint8_t* stripe, long blocks_per_head) : next_(stripe), per_head_(blocks_per_head) {}

    Block next() {
        if (left_ == 0) {
            head_ = next_;
            next_ += C::kHead;
            left_ = per_head_;
        }
        --left_;
        next_ += C::kBlock;
        return {head_, next_ - C::kBlock};
    }

  private:
    const uint8_t* head_ = nullptr;
    const uint8_t* next_;
    long per_head_;
    long left_ = 0;
};

// Calls body(Codes, part, bytes of the panel).
template <class Body>
void with_panel(const void* packed, long panel, const Body& body) {
    const CodeHeader& header = header_of(packed);
    const CodePart* part = header.parts + header.num_parts - 1;
    while (part->first_panel > panel) --part;
    const long at = part->offset + (panel - part->first_panel) * part->panel_bytes;
    AllCodes::with(part->format, [&](auto codes) { body(codes, *part, static_cast<const uint8_t*>(packed) + at); });
}

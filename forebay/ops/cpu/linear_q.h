// Quantized weights where there is AMX: how they are packed, and how they are opened, a panel at a time, into the form of
// a weight that is not quantized (linear.h). The dense kernels then run on it, so that the bits of a result are those of the opened
// weight.
//
// A weight [N, K] of groups of 32 inputs, each scale * (code - zero) + minimum, lies in panels of 32 outputs. A panel
// is a block per group, contiguous and in the order it is read:
//   codes     [2 halves of 16 outputs][words][32] uint32; lane e of a word belongs to output e / 2 and to inputs
//             2 * pair + e % 2. With 4 bits there are 2 words of 8 pairs, with 8 bits 4 of 4 pairs; the first pair is
//             in the word's lowest bits, and the word is rotated left by 15.
//   scales    float16 [32]
//   minimums  float16 [32], where there are any
// A header of one cache line comes first; outputs beyond N are zero. The bias is float32 [ceil(N/32) * 32].
//
// Rotated so, a code can be masked into the mantissa of a number from 1 to 2, and one fma makes the weight of it: with
// 8 bits 1 + code / 256, with 4 bits 1 + code / 256 or 1 + code / 16. What is added to the product is rounded, to
// within 2^-16 of a scale: far below the bfloat16 that the weight is rounded to.
#pragma once

#include <algorithm>
#include <type_traits>

#include "linear.h"
#include "simd.h"

constexpr long kHalf = 16;          // outputs
constexpr long kLanes = 2 * kHalf;  // of a word of codes
constexpr int kRotation = 15;

// The sizes and places within the block of a group.
template <int BITS, bool MINIMUMS>
struct Codes {
    static constexpr int kBits = BITS;
    static constexpr bool kMinimums = MINIMUMS;
    static constexpr long kWords = BITS / 2;
    static constexpr long kPairs = 32 / BITS;  // of inputs in a word
    static constexpr long kHalfCodes = kWords * kLanes * 4;
    static constexpr long kScalesAt = 2 * kHalfCodes;
    static constexpr long kMinimumsAt = kScalesAt + kPanel * 2;
    static constexpr long kBlock = kMinimumsAt + (MINIMUMS ? kPanel * 2 : 0);
};

// Calls body(Codes<...>{}) for the format that `header` names.
template <class Body>
void with_codes(const CodeHeader& header, const Body& body) {
    if (header.bits == 4) {
        header.minimums ? body(Codes<4, true>{}) : body(Codes<4, false>{});
    } else {
        header.minimums ? body(Codes<8, true>{}) : body(Codes<8, false>{});
    }
}

template <int BITS>
FOREBAY_INLINE Word rotate_right(Word x) {
    return _mm512_ror_epi32(x, BITS);
}
FOREBAY_INLINE Vec masked_mantissa(Word x, int32_t mask) {
    constexpr int kAndOr = 0xea;  // (x & mask) | one
    return {_mm512_castsi512_ps(
        _mm512_ternarylogic_epi32(x, _mm512_set1_epi32(mask), _mm512_set1_epi32(0x3f800000), kAndOr))};
}

// The numbers of outputs that lanes v * W.. belong to.
template <int V>
FOREBAY_INLINE Vec load_by_output(const uint8_t* p) {
    const __m512 all = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    const __m512i twice = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    return {_mm512_permutexvar_ps(_mm512_add_epi32(twice, _mm512_set1_epi32(8 * V)), all)};
}

FOREBAY_INLINE void store_lanes(float* p, const Vec (&x)[kLanes / W]) {
    for (long v = 0; v < kLanes / W; ++v) store(p + v * W, x[v]);
}
FOREBAY_INLINE void store_lanes(bf16* p, const Vec (&x)[kLanes / W]) {
    _mm512_storeu_si512(p, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(x[1].v, x[0].v)));
}

// The weights of 16 outputs in one group -> out [16 pairs of inputs][32 lanes].
template <class C, class T>
FOREBAY_INLINE void open_half(const uint8_t* block, long half, float zero, T* out) {
    constexpr int kVecs = kLanes / W;
    constexpr int kFine = 256, kCoarse = 16;  // a code of 1 is 1 / 256 or 1 / 16
    Vec fine[kVecs], coarse[kVecs], fine_offset[kVecs], coarse_offset[kVecs];
    unrolled<kVecs>([&](auto v) FOREBAY_INLINE_LAMBDA {
        const Vec scale = load_by_output<v>(block + C::kScalesAt + half * kHalf * 2);
        Vec minimum = ::zero();
        if constexpr (C::kMinimums) minimum = load_by_output<v>(block + C::kMinimumsAt + half * kHalf * 2);
        fine[v] = scale * set1(kFine);
        coarse[v] = scale * set1(kCoarse);
        fine_offset[v] = fma(scale, set1(-kFine - zero), minimum);
        coarse_offset[v] = fma(scale, set1(-kCoarse - zero), minimum);
    });
    const uint8_t* words = block + half * C::kHalfCodes;
    for (long w = 0; w < C::kWords; ++w, words += kLanes * 4, out += C::kPairs * kLanes) {
        unrolled<4>([&](auto quarter) FOREBAY_INLINE_LAMBDA {
            Vec low[kVecs], high[kVecs];
            unrolled<kVecs>([&](auto v) FOREBAY_INLINE_LAMBDA {
                Word codes = load_word(words + v * W * 4);
                if constexpr (quarter > 0) codes = rotate_right<8 * quarter>(codes);
                if constexpr (C::kBits == 8) {
                    low[v] = fma(fine[v], masked_mantissa(codes, 0xff << kRotation), fine_offset[v]);
                } else {
                    low[v] = fma(fine[v], masked_mantissa(codes, 0xf << kRotation), fine_offset[v]);
                    high[v] = fma(coarse[v], masked_mantissa(codes, 0xf << (kRotation + 4)), coarse_offset[v]);
                }
            });
            store_lanes(out + quarter * (C::kPairs / 4) * kLanes, low);
            if constexpr (C::kBits == 4) store_lanes(out + (quarter * 2 + 1) * kLanes, high);
        });
    }
}

constexpr long kOpenAhead = 4096;  // bytes of a panel that are fetched ahead of what is opened

template <class C>
FOREBAY_INLINE void fetch_ahead(const uint8_t* block) {
    for (long line = 0; line < C::kBlock; line += 64) {
        _mm_prefetch(reinterpret_cast<const char*>(block) + kOpenAhead + line, _MM_HINT_T0);
    }
}

// One group of a panel in the form of linear.h.
template <class C>
void open_group(const uint8_t* block, float zero, bf16* out) {
    fetch_ahead<C>(block);
    for (long half = 0; half < 2; ++half) open_half<C>(block, half, zero, out + half * kTile);
}
template <class C>
void open_group(const uint8_t* block, float zero, float* out) {
    fetch_ahead<C>(block);
    float lanes[kGroup / 2][kLanes];
    for (long half = 0; half < 2; ++half) {
        open_half<C>(block, half, zero, &lanes[0][0]);
        for (long k = 0; k < kGroup; ++k) {
            for (long n = 0; n < kHalf; ++n) out[k * kPanel + half * kHalf + n] = lanes[k / 2][n * 2 + k % 2];
        }
    }
}

// A quantized weight as the dense kernels read it. A panel is opened into this thread's scratch, and stays open until
// the thread opens the next one.
template <class C, class T>
class CodePanels {
  public:
    static constexpr long kGroupSize = kGroup * kPanel;

    CodePanels(const uint8_t* packed, long inputs)
        : blocks_(packed + kHeaderBytes), zero_(static_cast<float>(header_of(packed).zero)), groups_(inputs / kGroup) {}

    // Opened group by group, as it is first read.
    class Panel {
      public:
        Panel(const uint8_t* blocks, float zero, long groups)
            : blocks_(blocks),
              zero_(zero),
              groups_(groups),
              open_(static_cast<T*>(thread_scratch(groups * kGroupSize * static_cast<long>(sizeof(T))))) {}

        const T* all() { return open_to(groups_), open_; }

        // One group is opened ahead of its reader, who then need not wait for the stores.
        FOREBAY_INLINE const T* step(long s) {
            open_to(std::min(s + 2, groups_));
            return open_ + s * kGroupSize;
        }

      private:
        FOREBAY_INLINE void open_to(long end) {
            for (; num_open_ < end; ++num_open_) {
                open_group<C>(blocks_ + num_open_ * C::kBlock, zero_, open_ + num_open_ * kGroupSize);
            }
        }

        const uint8_t* blocks_;
        float zero_;
        long groups_;
        T* open_;
        long num_open_ = 0;
    };

    Panel open(long panel) const { return {blocks_ + panel * groups_ * C::kBlock, zero_, groups_}; }

  private:
    const uint8_t* blocks_;
    float zero_;
    long groups_;
};

// Calls body(CodePanels) of a packed weight.
template <class T, class Body>
void with_panels(const void* packed, long inputs, const Body& body) {
    const auto* bytes = static_cast<const uint8_t*>(packed);
    with_codes(header_of(bytes), [&](auto codes) { body(CodePanels<decltype(codes), T>(bytes, inputs)); });
}

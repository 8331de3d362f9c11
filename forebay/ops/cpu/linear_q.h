// Quantized weights where there is AMX: their codes (codes.h), and how they are opened, a panel at a time, into the form of
// a weight that is not quantized (linear.h). The dense kernels then run on it, so that the bits of a result are those of the
// opened weight.
//
// A plane of b bits of 16 outputs' codes is [b / 2 words][32] uint32; lane e of a word belongs to output e / 2 and to inputs
// 2 * pair + e % 2. The first pair is in the word's lowest bits, and the word is rotated left by 15, and for high bits by
// what stands below them. A plane of one bit is [32] uint16, not rotated.
//
// Rotated so, a code can be masked into the mantissa of a number from 1 to 2, and one fma makes the weight of it:
// 1 + code / 256, or, of two codes of 4 bits, 1 + code / 256 and 1 + code / 16. What is added to the product is rounded,
// to within 2^-16 of a scale: far below the bfloat16 that the weight is rounded to.
#pragma once

#include <algorithm>
#include <type_traits>

#include "codes.h"
#include "simd.h"

constexpr long kLanes = 2 * kHalf;  // of a word of codes
constexpr int kRotation = 15;

// What codes of formats with levels stand for.
alignas(64) constexpr float kIq4[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
alignas(64) constexpr float kE2m1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

inline Word load_short_word(const uint8_t* p) {
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
template <int BITS>
FOREBAY_INLINE Word rotate_right(Word x) {
    return BITS % 32 == 0 ? x : _mm512_ror_epi32(x, BITS & 31);
}
// (x & mask) | rest
FOREBAY_INLINE Word masked_into(Word x, int32_t mask, Word rest) {
    return _mm512_ternarylogic_epi32(x, _mm512_set1_epi32(mask), rest, 0xea);
}
FOREBAY_INLINE Word ones() { return _mm512_set1_epi32(0x3f800000); }
// The numbers of E4M3 codes in the highest byte of each lane: sign and magnitude are moved to where a float32 has them,
// whose exponent is then 120 too low. So is that of what is no normal number.
FOREBAY_INLINE Vec from_e4m3(Word x) {
    return as_floats(_mm512_and_si512(_mm512_srai_epi32(x, 4), _mm512_set1_epi32(static_cast<int32_t>(0x87f00000)))) *
           set1(0x1p120f);
}
// Entries of a table, by the lowest four bits.
template <class C>
FOREBAY_INLINE Vec levels_of(Word x) {
    return {_mm512_permutexvar_ps(x, _mm512_load_ps(C::kTable == Levels::kIq4 ? kIq4 : kE2m1))};
}

// The numbers of outputs that lanes v * W.. belong to, of float16 or float32.
template <int V, int BYTES = 2>
FOREBAY_INLINE Vec load_by_output(const uint8_t* p) {
    const __m512 all =
        BYTES == 4 ? _mm512_loadu_ps(p) : _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    const __m512i twice = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    return {_mm512_permutexvar_ps(_mm512_add_epi32(twice, _mm512_set1_epi32(8 * V)), all)};
}
// The same of int8.
template <int V>
FOREBAY_INLINE __m128i bytes_by_output(const uint8_t* p) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + V * 8));
    return _mm_unpacklo_epi8(bytes, bytes);
}
FOREBAY_INLINE Vec from_bytes(__m128i x) { return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(x))}; }

FOREBAY_INLINE void store_lanes(float* p, const Vec (&x)[kLanes / W]) {
    for (long v = 0; v < kLanes / W; ++v) store(p + v * W, x[v]);
}
FOREBAY_INLINE void store_lanes(bf16* p, const Vec (&x)[kLanes / W]) {
    _mm512_storeu_si512(p, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(x[1].v, x[0].v)));
}

// The scales of the outputs of a half that lanes v * W.. belong to.
template <class C, int V>
FOREBAY_INLINE Vec scales_by_output(const uint8_t* head, long half) {
    if constexpr (C::kScales == Scales::kE8m0) {
        // Half of 2^(e - 127), whose least is no normal number.
        const __m512i exponents = _mm512_cvtepu8_epi32(bytes_by_output<V>(head + half * kHalf));
        const __m512i powers = _mm512_max_epi32(_mm512_slli_epi32(exponents, 23), _mm512_set1_epi32(0x00400000));
        return as_floats(powers) * set1(0.5f);
    } else {
        return load_by_output<V, C::kScaleBytes>(head + half * kHalf * C::kScaleBytes);
    }
}

// Scales and minimums of 16 outputs and the I-th half of a block's inputs, lane by lane.
struct Affine {
    Vec scale, minimum;
};
template <class C, int I, int V>
FOREBAY_INLINE Affine affine(const Block& block, long half) {
    Affine of{scales_by_output<C, V>(block.head, half), zero()};
    if constexpr (C::kMinimums) of.minimum = load_by_output<V>(block.head + kPanel * C::kScaleBytes + half * kHalf * 2);
    if constexpr (C::kFactors) {
        const long at = I * (C::kParts - 1) * kPanel + half * kHalf;
        __m128i factors = bytes_by_output<V>(block.codes + C::kFactorsAt + at);
        if constexpr (C::kMinimums) {
            __m128i minimums = bytes_by_output<V>(block.codes + C::kMinimumFactorsAt + at);
            if constexpr (C::kShared) {
                factors = _mm_and_si128(factors, _mm_set1_epi8(15));
                minimums = _mm_and_si128(_mm_srli_epi16(minimums, 4), _mm_set1_epi8(15));
            }
            of.minimum = of.minimum * from_bytes(minimums);
        }
        if constexpr (C::kScales == Scales::kFloat32) {
            of.scale = of.scale * from_e4m3(_mm512_slli_epi32(_mm512_cvtepi8_epi32(factors), 24));
        } else {
            of.scale = of.scale * from_bytes(factors);
        }
    }
    return of;
}

// The codes of one pair of inputs, in the mantissas of numbers from 1 to 2, or what they stand for.
template <class C, int PAIR>
FOREBAY_INLINE Vec code_of(Word low, Word high) {
    constexpr int kAt = PAIR * C::kLow % 32;
    if constexpr (C::kLevels) {
        return levels_of<C>(rotate_right<kAt + kRotation>(low));
    } else if constexpr (C::kFloats) {
        return from_e4m3(rotate_right<kAt + kRotation + 8>(low));
    } else {
        Word code = masked_into(rotate_right<kAt>(low), ((1 << C::kLow) - 1) << kRotation, ones());
        if constexpr (C::kHigh > 0) {
            constexpr int kTurn = C::kHigh == 1 ? PAIR - kRotation - C::kLow : PAIR * C::kHigh;
            const int32_t mask = ((1 << C::kHigh) - 1) << (kRotation + C::kLow);
            code = masked_into(rotate_right<(kTurn & 31)>(high), mask, code);
        }
        return as_floats(code);
    }
}

// The weights of 16 outputs in one block -> out [16 pairs of inputs][32 lanes].
template <class C, class T>
FOREBAY_INLINE void open_half(const Block& block, long half, T* out) {
    constexpr int kVecs = kLanes / W;
    constexpr int kFine = 256, kCoarse = 16;  // a code of 1 is 1 / 256 or 1 / 16
    constexpr bool kNumbers = C::kLevels || C::kFloats;
    const uint8_t* words = block.codes + half * C::kHalfBytes;
    const uint8_t* high_words = words + C::kLowBytes;
    unrolled<2>([&](auto i) FOREBAY_INLINE_LAMBDA {
        Vec fine[kVecs], fine_offset[kVecs], coarse[kVecs], coarse_offset[kVecs];
        Word high[kVecs] = {};
        unrolled<kVecs>([&](auto v) FOREBAY_INLINE_LAMBDA {
            const Affine of = affine<C, i, v>(block, half);
            fine[v] = kNumbers ? of.scale : of.scale * set1(kFine);
            fine_offset[v] = kNumbers ? of.minimum : fma(of.scale, set1(-kFine - C::kZero), of.minimum);
            coarse[v] = of.scale * set1(kCoarse);
            coarse_offset[v] = fma(of.scale, set1(-kCoarse - C::kZero), of.minimum);
            if constexpr (C::kHigh == 1) high[v] = load_short_word(high_words + v * W * 2);
            if constexpr (C::kHigh == 2) high[v] = load_word(high_words + v * W * 4);
        });
        // Two pairs at a time: neighbours of 4 bits come out of one rotation.
        unrolled<4>([&](auto j) FOREBAY_INLINE_LAMBDA {
            constexpr int kPair = 8 * i + 2 * j;
            Vec first[kVecs], second[kVecs];
            unrolled<kVecs>([&](auto v) FOREBAY_INLINE_LAMBDA {
                const Word low = load_word(words + kPair * C::kLow / 32 * kLanes * 4 + v * W * 4);
                first[v] = fma(fine[v], code_of<C, kPair>(low, high[v]), fine_offset[v]);
                if constexpr (C::kLow == 4 && C::kHigh == 0 && !C::kLevels) {
                    const Word turned = rotate_right<kPair * 4 % 32>(low);
                    const Vec code = as_floats(masked_into(turned, 0xf << (kRotation + 4), ones()));
                    second[v] = fma(coarse[v], code, coarse_offset[v]);
                } else {
                    second[v] = fma(fine[v], code_of<C, kPair + 1>(low, high[v]), fine_offset[v]);
                }
            });
            store_lanes(out + kPair * kLanes, first);
            store_lanes(out + (kPair + 1) * kLanes, second);
        });
    });
}

constexpr long kOpenAhead = 4096;  // bytes of a panel that are fetched ahead of what is opened

template <class C>
FOREBAY_INLINE void fetch_ahead(const uint8_t* codes) {
    for (long line = 0; line < C::kBlock; line += 64) {
        __builtin_prefetch(codes + kOpenAhead + line);
    }
}

// One block of a panel in the form of linear.h.
template <class C>
void open_block(const Block& block, bf16* out) {
    fetch_ahead<C>(block.codes);
    for (long half = 0; half < 2; ++half) open_half<C>(block, half, out + half * kTile);
}
template <class C>
void open_block(const Block& block, float* out) {
    fetch_ahead<C>(block.codes);
    float lanes[kGroup / 2][kLanes];
    for (long half = 0; half < 2; ++half) {
        open_half<C>(block, half, &lanes[0][0]);
        for (long k = 0; k < kGroup; ++k) {
            for (long n = 0; n < kHalf; ++n) out[k * kPanel + half * kHalf + n] = lanes[k / 2][n * 2 + k % 2];
        }
    }
}

// A panel as the dense kernels read it: opened into this thread's scratch, block by block as it is first read, where it
// stays until the thread opens the next one.
template <class C, class T>
class OpenedPanel {
  public:
    static constexpr long kBlockSize = kGroup * kPanel;

    OpenedPanel(const uint8_t* panel, const CodePart& part, long inputs)
        : blocks_(panel, part.blocks),
          count_(inputs / kGroup),
          open_(static_cast<T*>(thread_scratch(count_ * kBlockSize * static_cast<long>(sizeof(T))))) {}

    const T* all() { return open_to(count_), open_; }

    // One block is opened ahead of its reader, who then need not wait for the stores.
    FOREBAY_INLINE const T* step(long s) {
        open_to(std::min(s + 2, count_));
        return open_ + s * kBlockSize;
    }

  private:
    FOREBAY_INLINE void open_to(long end) {
        for (; num_open_ < end; ++num_open_) open_block<C>(blocks_.next(), open_ + num_open_ * kBlockSize);
    }

    Blocks<C> blocks_;
    long count_;
    T* open_;
    long num_open_ = 0;
};

// A quantized weight as the dense kernels read it; T is what its panels are opened to.
template <class T>
class CodePanels {
  public:
    CodePanels(const void* packed, long inputs) : packed_(packed), inputs_(inputs) {}

    // Calls body(OpenedPanel).
    template <class Body>
    void open(long panel, const Body& body) const {
        with_panel(packed_, panel, [&](auto codes, const CodePart& part, const uint8_t* bytes) {
            body(OpenedPanel<decltype(codes), T>(bytes, part, inputs_));
        });
    }

  private:
    const void* packed_;
    long inputs_;
};

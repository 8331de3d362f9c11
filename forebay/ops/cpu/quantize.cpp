// Rows of numbers to codes, as formats/quantize.py defines it, to the bit: groups of 32 inputs, each with its own scale.
#include <atomic>
#include <bit>
#include <cmath>
#include <limits>

#include "ints.h"
#include "linear.h"
#include "rows.h"

namespace {

constexpr float kLargestHalf = 65504;

struct Half {
    uint16_t bits;
};

template <class T>
FOREBAY_INLINE Vec load_values(const T* x) {
    return load(x);
}
FOREBAY_INLINE Vec load_values(const Half* x) { return load_float16(reinterpret_cast<const uint8_t*>(x)); }

#if defined(__F16C__)
FOREBAY_INLINE uint16_t half_of(float x) { return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT); }
FOREBAY_INLINE float value_of(uint16_t half) { return _cvtsh_ss(half); }
#else
// To nearest even; x is at most the largest half. What is no normal half has steps of 2^-24, which a float has from 0.5 on.
FOREBAY_INLINE uint16_t half_of(float x) {
    const uint32_t bits = std::bit_cast<uint32_t>(x), magnitude = bits & 0x7fffffff;
    const uint32_t sign = bits >> 16 & 0x8000;
    if (magnitude < 0x38800000) {
        const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
        return sign | (std::bit_cast<uint32_t>(shifted) - std::bit_cast<uint32_t>(0.5f));
    }
    return sign | ((magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13);
}
FOREBAY_INLINE float value_of(uint16_t half) {
    return std::bit_cast<float>((half & 0x8000u) << 16 | (half & 0x7fffu) << 13) * 0x1p112f;
}
#endif

#if defined(__AVX2__) && !defined(__AVX512F__)
FOREBAY_INLINE void store_group(uint8_t* p, const Ints (&a)[4]) {
    const __m256i first = _mm256_packus_epi32(a[0].v, a[1].v), second = _mm256_packus_epi32(a[2].v, a[3].v);
    const __m256i in_order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);  // packed by halves of a register
    const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(first, second), in_order);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), bytes);
}
#else
FOREBAY_INLINE void store_group(uint8_t* p, const Ints (&a)[kGroup / W]) {
    unrolled<kGroup / W>([&](auto i) FOREBAY_INLINE_LAMBDA { store_bytes(reinterpret_cast<int8_t*>(p + i * W), a[i]); });
}
#endif

// Rows first.. of what `fb_quantize` is given, BITS of each code: whether all scales and minimums are in a half's range.
template <int BITS, class T>
bool quantize_row(const T* x, uint8_t* codes, uint16_t* scales, uint16_t* minimums, long inputs) {
    constexpr int kVecs = kGroup / W;
    Vec poison = zero();
    bool in_range = true;
    for (long k = 0; k < inputs; k += kGroup, ++scales) {
        Vec v[kVecs], high = set1(-std::numeric_limits<float>::infinity()), low = high;
        unrolled<kVecs>([&](auto i) FOREBAY_INLINE_LAMBDA {
            v[i] = load_values(x + k + i * W);
            high = max(high, v[i]);
            low = max(low, zero() - v[i]);  // the least, negated
            poison = fma(v[i], zero(), poison);
        });
        float minimum = 0, step;
        if constexpr (BITS == 8) {
            step = hmax(max(high, low)) / 127;
        } else {
            const float least = 0.0f - hmax(low);
            step = (hmax(high) + 0.0f - least) / 15;  // no scale is -0, whichever zero `max` returns
            in_range &= std::abs(least) <= kLargestHalf;
            minimum = value_of(*minimums++ = half_of(least));
        }
        in_range &= step <= kLargestHalf;
        const float scale = value_of(*scales = half_of(step));
        const Vec divisor = set1(scale > 0 ? scale : std::numeric_limits<float>::infinity()), taken = set1(minimum);
        const Vec lowest = set1(BITS == 8 ? -128 : 0), highest = set1(BITS == 8 ? 127 : 15);
        Ints code[kVecs];
        unrolled<kVecs>([&](auto i) FOREBAY_INLINE_LAMBDA {
            const Vec whole = round((BITS == 8 ? v[i] : v[i] - taken) / divisor);
            code[i] = to_ints(max(min(whole, highest), lowest)) + set1_int(BITS == 8 ? 128 : 0);
        });
        store_group(codes + k, code);
    }
    const float sum = hsum(poison);
    return in_range && sum == sum;
}

template <class T>
long quantize(Pool& pool, const T* x, uint8_t* codes, uint16_t* scales, uint16_t* minimums, long rows, long inputs) {
    std::atomic<bool> in_range = true;
    pool.run(rows, grain_for(inputs), [&](long begin, long end) {
        for (long r = begin; r < end; ++r) {
            const long group = r * (inputs / kGroup);
            const bool fits =
                minimums == nullptr
                    ? quantize_row<8>(x + r * inputs, codes + r * inputs, scales + group, nullptr, inputs)
                    : quantize_row<4>(x + r * inputs, codes + r * inputs, scales + group, minimums + group, inputs);
            if (!fits) in_range.store(false, std::memory_order_relaxed);
        }
    });
    return in_range.load();
}

}  // namespace

extern "C" {

// x [rows, inputs] contiguous, inputs a multiple of 32 -> codes [rows, inputs], scales and minimums float16 [rows, inputs /
// 32]: of 4 bits, or of 8 where minimums are null. Returns 0 if a scale or minimum is no half: nothing is then of use.
#define FOREBAY_QUANTIZE(T, suffix)                                                                                \
    long fb_quantize_##suffix(Pool* pool, const void* x, uint8_t* codes, uint16_t* scales, uint16_t* minimums,    \
                              long rows, long inputs) {                                                           \
        return quantize(*pool, static_cast<const T*>(x), codes, scales, minimums, rows, inputs);                  \
    }

FOREBAY_QUANTIZE(float, f32)
FOREBAY_QUANTIZE(bf16, bf16)
FOREBAY_QUANTIZE(Half, f16)
}

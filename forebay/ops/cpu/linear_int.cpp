// Linear layers of quantized weights without AMX: codes by rounded activations.
//
// The products of a group are summed as integers, exactly; then one multiply-add in float32 for each part that has a scale
// and one for its minimum, in ascending order of inputs. So a result's bits do not depend on what is computed beside it.
#if !defined(FOREBAY_AMX)

#include "codes.h"
#include "rounded.h"
#include "rows.h"

namespace {

constexpr long kFetchAhead = 4096;  // bytes of a panel that are fetched ahead of what is read

// ROWS rows by W outputs of half a panel -> sums [ROWS][kPanel].
template <class C, int PLANES, int ROWS>
void multiply(const RoundedGroup<PLANES>* x, const uint8_t* codes, long lane, long inputs, float* sums) {
    Vec sum[ROWS];
    const auto each_row = [](const auto& body) FOREBAY_INLINE_LAMBDA { unrolled<ROWS>(body); };
    each_row([&](auto r) FOREBAY_INLINE_LAMBDA { sum[r] = zero(); });
    for (long k = 0; k < inputs; k += kGroup * C::kGroups, codes += C::kBlock) {
        for (long line = 0; line < C::kBlock; line += 64) {
            _mm_prefetch(reinterpret_cast<const char*>(codes) + kFetchAhead + line, _MM_HINT_T0);
        }
        for (long group = 0; group < C::kGroups; ++group, x += ROWS) {
            unrolled<C::kParts>([&](auto part) FOREBAY_INLINE_LAMBDA {
                constexpr int sum_at = C::kParts == 1 ? 2 : part;
                Dots<C::kBits> dots[ROWS][PLANES];
                each_row([&](auto r) FOREBAY_INLINE_LAMBDA {
                    unrolled<PLANES>([&](auto plane) FOREBAY_INLINE_LAMBDA { dots[r][plane].clear(); });
                });
                C::for_each_four(codes, group, part, lane, [&](int four, Ints c) FOREBAY_INLINE_LAMBDA {
                    each_row([&](auto r) FOREBAY_INLINE_LAMBDA {
                        unrolled<PLANES>([&](auto plane) FOREBAY_INLINE_LAMBDA {
                            int32_t integers;
                            std::memcpy(&integers, x[r].planes[plane] + four * 4, sizeof integers);
                            dots[r][plane].add(c, set1_int(integers));
                        });
                    });
                });
                const Vec scale = C::scale(codes, group, part, lane);
                [[maybe_unused]] Vec minimum = zero();
                if constexpr (C::kMinimums) minimum = C::minimum(codes, group, part, lane);
                each_row([&](auto r) FOREBAY_INLINE_LAMBDA {
                    Ints total = dots[r][0].total();
                    if constexpr (PLANES == 2) total = shift_left<8>(total) + dots[r][1].total();
                    if constexpr (C::kZero > 0) {
                        constexpr int shift = std::countr_zero(unsigned{C::kZero});
                        total = total + shift_left<shift>(set1_int(x[r].minus_sums[sum_at]));
                    }
                    sum[r] = fma(to_float(total), scale * set1(x[r].scale), sum[r]);
                    if constexpr (C::kMinimums) sum[r] = fma(minimum, set1(x[r].sums[sum_at]), sum[r]);
                });
            });
        }
    }
    each_row([&](auto r) FOREBAY_INLINE_LAMBDA { store(sums + r * kPanel, sum[r]); });
}

// A block of rows by one panel.
using MultiplyPanel = void (*)(const void* x, const uint8_t* panel, long inputs, long rows, float* sums);

template <class C, int PLANES, int ROWS = kMostRows>
void multiply_panel(const void* x, const uint8_t* panel, long inputs, long rows, float* sums) {
    if constexpr (ROWS > 1) {
        if (rows < ROWS) return multiply_panel<C, PLANES, ROWS / 2>(x, panel, inputs, rows, sums);
    }
    const auto* groups = static_cast<const RoundedGroup<PLANES>*>(x);
    for (long n = 0; n < kPanel; n += W) {
        multiply<C, PLANES, ROWS>(groups, panel + n / kHalf * half_bytes<C>(inputs), n % kHalf, inputs, sums + n);
    }
}

// A packed weight, and what multiplies it.
struct Weight {
    const uint8_t* panels;
    long bits;  // of activations
    long panel_bytes;
    MultiplyPanel multiply;

    Weight(const void* packed, long inputs) {
        const auto* bytes = static_cast<const uint8_t*>(packed);
        const CodeHeader& header = header_of(bytes);
        panels = bytes + kHeaderBytes;
        bits = header.activation_bits;
        with_codes(header, [&](auto codes) {
            using C = decltype(codes);
            panel_bytes = 2 * half_bytes<C>(inputs);
            multiply = bits == 8 ? multiply_panel<C, 1> : multiply_panel<C, 2>;
        });
    }
};

template <class Out>
void write_rows(const float* sums, long rows, const float* bias, Out* out, long ldo, long columns) {
    for (long r = 0; r < rows; ++r) {
        for (long c = 0; c < columns; c += W) {
            store_part(out + r * ldo + c, load(sums + r * kPanel + c) + load(bias + c), std::min<long>(W, columns - c));
        }
    }
}

// Rounded rows first..end by one panel.
template <class Out>
void multiply_rows(const Weight& weight, const void* rounded, const float* bias, Out* out, long ldo, long inputs,
                   long outputs, long panel, long first, long end) {
    const long column = panel * kPanel;
    float sums[kMostRows * kPanel];
    for (long r = first; r < end; r += kMostRows) {
        const auto* x = static_cast<const uint8_t*>(rounded) + rounded_bytes(weight.bits, r, inputs);
        weight.multiply(x, weight.panels + panel * weight.panel_bytes, inputs, rows_of_block(end - r), sums);
        write_rows(sums, std::min<long>(kMostRows, end - r), bias + column, out + r * ldo + column, ldo,
                   std::min(kPanel, outputs - column));
    }
}

template <class T, class Out>
void linear(Pool& pool, const T* x, long ldx, const void* packed, const float* bias, Out* out, long rows, long inputs,
            long outputs) {
    const Weight weight(packed, inputs);
    auto* rounded = static_cast<uint8_t*>(thread_scratch(rounded_bytes(weight.bits, rows, inputs)));
    pool.run(ceil_div(rows, kMostRows), grain_for(kMostRows * inputs), [=](long begin, long end) {
        const long first = begin * kMostRows;
        round_rows(x + first * ldx, ldx, std::min(rows, end * kMostRows) - first, inputs, weight.bits,
                   rounded + rounded_bytes(weight.bits, first, inputs));
    });
    for_each_panel(pool, rows, outputs, [=](long panel, long first, long end) {
        multiply_rows(weight, rounded, bias, out, outputs, inputs, outputs, panel, first, end);
    });
}

// x as round_rows makes it.
template <class Out>
void linear_panels(const void* x, long, const void* packed, const float* bias, void* out, long ldo, long rows,
                   long inputs, long outputs, long first, long end) {
    const Weight weight(packed, inputs);
    for (long panel = first; panel < end; ++panel) {
        multiply_rows(weight, x, bias, static_cast<Out*>(out), ldo, inputs, outputs, panel, 0, rows);
    }
}

}  // namespace

#define FOREBAY_LINEAR_INT(T, Out, suffix)                                                                        \
    void fb_linear_q_##suffix(Pool* pool, const T* x, long ldx, const void* packed, const float* bias, Out* out,  \
                              long rows, long inputs, long outputs) {                                             \
        pool->op([=](Pool& p) { linear(p, x, ldx, packed, bias, out, rows, inputs, outputs); });                  \
    }

extern "C" {

FOREBAY_LINEAR_INT(float, float, f32)
FOREBAY_LINEAR_INT(bf16, bf16, bf16)
FOREBAY_LINEAR_INT(bf16, float, bf16_f32)

void fb_linear_panels_q_f32(FOREBAY_LINEAR_PANELS) {
    linear_panels<float>(x, ldx, packed, bias, out, ldo, rows, inputs, outputs, first, end);
}

void fb_linear_panels_q_bf16(FOREBAY_LINEAR_PANELS) {
    linear_panels<bf16>(x, ldx, packed, bias, out, ldo, rows, inputs, outputs, first, end);
}
}

#endif

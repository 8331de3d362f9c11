// Linear layers of quantized weights without AMX: codes by rounded activations.
//
// The products of a group are summed as integers, exactly, or in float32 where codes are floats; then one multiply-add in
// float32 for each part that has a scale and one for its minimum, in ascending order of inputs. So a result's bits do not depend on what is computed beside it.
#if !defined(FOREBAY_AMX)

#include <bit>

#include "linear_int.h"
#include "rounded.h"
#include "rows.h"

namespace {

constexpr long kRoundingCost = 4;  // times that of copying, by which work is cut
constexpr long kFetchAhead = 8192;  // bytes of a panel that are fetched ahead of what is read
constexpr int kMostDots = 4;        // accumulators of integers by W outputs: twice as many fit beside the rows' sums

// ROWS rows by VECS times W outputs of a stripe -> sums [ROWS][kPanel].
template <class C, int PLANES, int ROWS, int VECS>
void multiply(const RoundedGroup<PLANES>* x, const uint8_t* stripe, long blocks_per_head, long lane, long inputs,
              float* sums) {
    using D = Dots<C::kBits, ROWS>;
    constexpr int kFours = 8 / C::kParts;
    static_assert(C::kZero >= D::kLowered);
    Vec sum[ROWS][VECS];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
        unrolled<VECS>([&](auto v) FOREBAY_INLINE_LAMBDA { sum[r][v] = zero(); });
    }
    const uint8_t* head = stripe;
    const uint8_t* next = stripe + C::kHead;
    const uint8_t* end = next + blocks_per_head * C::kBlock;  // of the blocks that share scales
    for (long k = 0; k < inputs; k += kGroup, x += ROWS) {
        const Block block{head, next};
        next += C::kBlock;
        if (next == end) {
            head = end;
            next = end + C::kHead;
            end = next + blocks_per_head * C::kBlock;
        }
        for (long line = 0; line < C::kBlock; line += 64) {
            __builtin_prefetch(block.codes + kFetchAhead + line);
        }
        unrolled<C::kParts>([&](auto part) FOREBAY_INLINE_LAMBDA {
            constexpr int sum_at = C::kParts == 1 ? 2 : part;
            D dots[ROWS / D::kRows][VECS][PLANES];
#pragma GCC unroll 8
            for (int r = 0; r < ROWS / D::kRows; ++r) {
                unrolled<VECS * PLANES>([&](auto i) FOREBAY_INLINE_LAMBDA { dots[r][i / PLANES][i % PLANES].clear(); });
            }
            unrolled<kFours / D::kFours>([&](auto i) FOREBAY_INLINE_LAMBDA {
                constexpr int four = part * kFours + i * D::kFours;
                Ints c[VECS][D::kFours];
                unrolled<VECS * D::kFours>([&](auto j) FOREBAY_INLINE_LAMBDA {
                    constexpr int v = j / D::kFours, at = j % D::kFours;
                    c[v][at] = four_codes<C, four + at>(block, lane + v * W);
                });
#pragma GCC unroll 8
                for (int r = 0; r < ROWS / D::kRows; ++r) {
#pragma GCC unroll 2
                    for (int plane = 0; plane < PLANES; ++plane) {
                        const int8_t* bytes = x[r * D::kRows].planes[plane] + four * 4;
                        unrolled<VECS>([&](auto v) FOREBAY_INLINE_LAMBDA {
                            dots[r][v][plane].template add<i * D::kFours>(c[v], bytes, sizeof(*x));
                        });
                    }
                }
            });
            unrolled<VECS>([&](auto v) FOREBAY_INLINE_LAMBDA {
                const PartScales<C> scales(block, part, lane + v * W);
#pragma GCC unroll 8
                for (int r = 0; r < ROWS; ++r) {
                    const auto& row = dots[r / D::kRows][v];
                    Ints total = row[0].total(r % D::kRows);
                    if constexpr (PLANES == 2) total = shift_left<8>(total) + row[1].total(r % D::kRows);
                    if constexpr (C::kZero > D::kLowered) {
                        constexpr int shift = std::countr_zero(unsigned{C::kZero - D::kLowered});
                        total = total + shift_left<shift>(set1_int(x[r].minus_sums[sum_at]));
                    }
                    Vec& s = sum[r][v];
                    s = fma(to_float(total), scales.scale * set1(x[r].scale), s);
                    if constexpr (C::kMinimums) s = fma(scales.minimum, set1(x[r].sums[sum_at]), s);
                }
            });
        });
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
        unrolled<VECS>([&](auto v) FOREBAY_INLINE_LAMBDA { store(sums + r * kPanel + v * W, sum[r][v]); });
    }
}

// The integers of a group as numbers.
template <int PLANES>
FOREBAY_INLINE void to_numbers(const RoundedGroup<PLANES>& x, float* out) {
    for (long i = 0; i < kGroup; i += W) {
        Vec n = load(x.planes[0] + i);
        if constexpr (PLANES == 2) n = fma(n, set1(256), load(x.planes[1] + i));
        store(out + i, n);
    }
}

// ROWS rows by VECS times W outputs of a panel, from `column` on, of codes that are floats: the products of a group are
// summed in float32 in the order of its inputs -> sums [ROWS][kPanel].
template <class C, int PLANES, int ROWS, int VECS>
void multiply_floats(const RoundedGroup<PLANES>* x, const uint8_t* panel, const CodePart& part, long column,
                     long inputs, float* sums) {
    const long apart = part.panel_bytes / 2;  // of stripes
    Blocks<C> blocks(panel + column / kStripe * apart, part.blocks);
    Vec sum[ROWS][VECS];
    for (auto& row : sum) {
        for (auto& s : row) s = zero();
    }
    for (long k = 0; k < inputs; k += kGroup, x += ROWS) {
        const Block first = blocks.next();
        float numbers[ROWS][kGroup];
        for (int r = 0; r < ROWS; ++r) to_numbers(x[r], numbers[r]);
        Vec dots[ROWS][VECS];
        for (auto& row : dots) {
            for (auto& d : row) d = zero();
        }
        for (long four = 0; four < kGroup / 4; ++four) {
            Ints codes[VECS];
            unrolled<VECS>([&](auto v) FOREBAY_INLINE_LAMBDA {
                const uint8_t* at = first.codes + v * W / kStripe * apart + four * kLine + v * W % kStripe * 4;
                __builtin_prefetch(at + kFetchAhead);
                codes[v] = load_ints(at);
            });
            unrolled<4>([&](auto i) FOREBAY_INLINE_LAMBDA {
                Vec weights[VECS];
                unrolled<VECS>([&](auto v) FOREBAY_INLINE_LAMBDA {
                    weights[v] = from_e4m3(shift_left<24 - 8 * i>(codes[v]));
                });
#pragma GCC unroll 8
                for (int r = 0; r < ROWS; ++r) {
                    const Vec n = set1(numbers[r][four * 4 + i]);
                    unrolled<VECS>([&](auto v) FOREBAY_INLINE_LAMBDA { dots[r][v] = fma(n, weights[v], dots[r][v]); });
                }
            });
        }
        unrolled<VECS>([&](auto v) FOREBAY_INLINE_LAMBDA {
            const Vec scale = load_scales<C>(first.head + v * W / kStripe * apart, v * W % kStripe);
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; ++r) sum[r][v] = fma(dots[r][v], scale * set1(x[r].scale), sum[r][v]);
        });
    }
    for (int r = 0; r < ROWS; ++r) {
        for (int v = 0; v < VECS; ++v) store(sums + r * kPanel + column + v * W, sum[r][v]);
    }
}

// A block of rows by one panel.
template <class C, int PLANES, int ROWS = kMostRows>
void multiply_panel(const void* x, const uint8_t* panel, const CodePart& part, long inputs, long rows, float* sums) {
    if constexpr (ROWS > 1) {
        if (rows < ROWS) return multiply_panel<C, PLANES, ROWS / 2>(x, panel, part, inputs, rows, sums);
    }
    const auto* groups = static_cast<const RoundedGroup<PLANES>*>(x);
    if constexpr (C::kFloats) {
        constexpr int kVecs = W == 16 || ROWS > 2 ? 2 : 4;  // whose sums stay in registers
        for (long n = 0; n < kPanel; n += kVecs * W) {
            multiply_floats<C, PLANES, ROWS, kVecs>(groups, panel, part, n, inputs, sums);
        }
    } else {
        // A stripe is read once if the sums of all its outputs stay in registers.
        constexpr int kVecs = ROWS * PLANES * (C::kBits > 6 ? 2 : 1) <= kMostDots ? kStripe / W : 1;
        for (long n = 0; n < kPanel; n += kVecs * W) {
            const uint8_t* stripe = panel + n / kStripe * part.panel_bytes / 2;
            multiply<C, PLANES, ROWS, kVecs>(groups, stripe, part.blocks, n % kStripe, inputs, sums + n);
        }
    }
}

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
void multiply_rows(const void* packed, const void* rounded, const float* bias, Out* out, long ldo, long inputs,
                   long outputs, long panel, long first, long end) {
    const long column = panel * kPanel, bits = header_of(packed).activation_bits;
    float sums[kMostRows * kPanel];
    with_panel(packed, panel, [&](auto codes, const CodePart& part, const uint8_t* bytes) {
        using C = decltype(codes);
        const auto multiply = bits == 8 ? multiply_panel<C, 1> : multiply_panel<C, 2>;
        for (long r = first; r < end; r += kMostRows) {
            const auto* x = static_cast<const uint8_t*>(rounded) + rounded_bytes(bits, r, inputs);
            multiply(x, bytes, part, inputs, rows_of_block(end - r), sums);
            write_rows(sums, std::min<long>(kMostRows, end - r), bias + column, out + r * ldo + column, ldo,
                       std::min(kPanel, outputs - column));
        }
    });
}

template <class T, class Out>
void linear(Pool& pool, const T* x, long ldx, const void* packed, const float* bias, Out* out, long rows, long inputs,
            long outputs) {
    const long bits = header_of(packed).activation_bits;
    auto* rounded = static_cast<uint8_t*>(thread_scratch(rounded_bytes(bits, rows, inputs)));
    pool.run(ceil_div(rows, kMostRows), grain_for(kRoundingCost * kMostRows * inputs), [=](long begin, long end) {
        const long first = begin * kMostRows;
        round_rows(x + first * ldx, ldx, std::min(rows, end * kMostRows) - first, inputs, bits,
                   rounded + rounded_bytes(bits, first, inputs));
    });
    for_each_panel(pool, rows, outputs, [=](long panel, long first, long end) {
        multiply_rows(packed, rounded, bias, out, outputs, inputs, outputs, panel, first, end);
    });
}

// x as round_rows makes it.
template <class Out>
void linear_panels(const void* x, long, const void* packed, const float* bias, void* out, long ldo, long rows,
                   long inputs, long outputs, long first, long end) {
    for (long panel = first; panel < end; ++panel) {
        multiply_rows(packed, x, bias, static_cast<Out*>(out), ldo, inputs, outputs, panel, 0, rows);
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

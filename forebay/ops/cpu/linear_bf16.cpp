// bfloat16 linear without AMX: pairs of inputs against the packed weight, in registers over all of K.
#if !defined(FOREBAY_AMX)

#include <vector>

#include "linear_bf16.h"
#include "simd.h"

namespace {

#if defined(FOREBAY_BFMMLA)

constexpr int kRows = 4;

// Four inputs of a row and of the next one.
FOREBAY_INLINE bfloat16x8_t two_rows(const bf16* x, long ldx) {
    return vreinterpretq_bf16_u16(vcombine_u16(vld1_u16(&x->bits), vld1_u16(&x[ldx].bits)));
}

// Rows in twos, of which a last one alone is multiplied twice: what BFMMLA makes of a row does not depend on the other, and
// rounds otherwise than a multiply-add.
template <int ROWS, class Out>
void block(const bf16* x, long ldx, const bf16* panel, long steps, const float* bias, Out* out, long ldo,
           long columns) {
    constexpr int kTwos = (ROWS + 1) / 2;
    for (long first = 0; first < columns; first += 16, panel += kTile) {
        float32x4_t sum[kTwos][8];  // of two rows by two outputs each
        for (auto& two : sum) {
            for (auto& s : two) s = vdupq_n_f32(0);
        }
        for (long k = 0; k < steps * kStep; k += kTogether) {
            const bf16* weights = panel + k / kStep * 2 * kTile + k % kStep * 16;
            bfloat16x8_t rows[kTwos];
            for (int t = 0; t < kTwos; ++t) rows[t] = two_rows(x + 2 * t * ldx + k, 2 * t + 1 < ROWS ? ldx : 0);
#pragma GCC unroll 8
            for (int n = 0; n < 8; ++n) {
                const bfloat16x8_t w = vreinterpretq_bf16_u16(vld1q_u16(&weights[n * 8].bits));
                for (int t = 0; t < kTwos; ++t) sum[t][n] = vbfmmlaq_f32(sum[t][n], rows[t], w);
            }
        }
        for (int r = 0; r < ROWS; ++r) {
            const auto& s = sum[r / 2];
            const auto join = [&](int n) { return r % 2 ? high_halves(s[n], s[n + 1]) : low_halves(s[n], s[n + 1]); };
            for (long n = 0; n < 16 && first + n < columns; n += W) {
                const Vec row{join(n / 2), join(n / 2 + 2)};
                const long column = first + n;
                store_part(out + r * ldo + column, row + load(bias + column), std::min<long>(W, columns - column));
            }
        }
    }
}

#else

constexpr int kVecs = kPanel / W;
constexpr int kRows = W == 16 ? 8 : 2;

// Adds the products of a pair of inputs with the weights of `kVecs` times W outputs.
inline void add_pair(Vec* sum, const bf16* pair, const bf16* weights) {
#if defined(FOREBAY_BF16)
    int32_t bits;
    std::memcpy(&bits, pair, sizeof bits);
    const auto a = reinterpret_cast<__m512bh>(_mm512_set1_epi32(bits));
    for (int v = 0; v < kVecs; ++v) {
        const auto w = reinterpret_cast<__m512bh>(_mm512_loadu_si512(weights + v * kTile));
        sum[v].v = _mm512_dpbf16_ps(sum[v].v, a, w);
    }
#else
    const Vec even = set1(to_float(pair[0]));
    const Vec odd = set1(to_float(pair[1]));
    for (int v = 0; v < kVecs; ++v) {
        const long at = v * W / 16 * kTile + v * W % 16 * 2;
        const Word w = load_word(weights + at);
        sum[v] = fma(even, first_of_pairs(w), sum[v]);
        sum[v] = fma(odd, second_of_pairs(w), sum[v]);
    }
#endif
}

template <int ROWS, class Out>
void block(const bf16* x, long ldx, const bf16* panel, long steps, const float* bias, Out* out, long ldo,
           long columns) {
    Vec sum[ROWS][kVecs];
    for (auto& row : sum) {
        for (auto& s : row) s = zero();
    }
    for (long step = 0; step < steps; ++step) {
        for (long pair = 0; pair < kStep / 2; ++pair) {
            const bf16* weights = panel + step * 2 * kTile + pair * 32;
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; ++r) add_pair(sum[r], x + r * ldx + step * kStep + pair * 2, weights);
        }
    }
    for (int r = 0; r < ROWS; ++r) {
        for (int v = 0; v < kVecs && v * W < columns; ++v) {
            store_part(out + r * ldo + v * W, sum[r][v] + load(bias + v * W), std::min<long>(W, columns - v * W));
        }
    }
}

#endif

template <int ROWS, class Out>
void block_of(long rows, const bf16* x, long ldx, const bf16* panel, long steps, const float* bias, Out* out, long ldo,
              long columns) {
    if (rows == ROWS) {
        block<ROWS>(x, ldx, panel, steps, bias, out, ldo, columns);
    } else if constexpr (ROWS > 1) {
        block_of<ROWS - 1>(rows, x, ldx, panel, steps, bias, out, ldo, columns);
    }
}

// x in whole steps: itself, or a copy in `padded` with zeros behind each row.
void pad_rows(const bf16*& x, long& ldx, long rows, long inputs, std::vector<bf16>& padded) {
    const long width = ceil_div(inputs, kStep) * kStep;
    if (width == inputs) return;
    padded.assign(rows * width, bf16{0});
    for (long r = 0; r < rows; ++r) std::copy_n(x + r * ldx, inputs, padded.data() + r * width);
    x = padded.data();
    ldx = width;
}

// Rows first..end of padded x by one panel.
template <class Panels, class Out>
void multiply_panel(const bf16* x, long ldx, const Panels& panels, const float* bias, Out* out, long ldo, long inputs,
                    long outputs, long panel, long first, long end) {
    const long steps = ceil_div(inputs, kStep), column = panel * kPanel;
    const bf16* weights = nullptr;
    panels.open(panel, [&](auto opened) { weights = opened.all(); });
    for (long r = first; r < end; r += kRows) {
        block_of<kRows>(std::min<long>(kRows, end - r), x + r * ldx, ldx, weights, steps, bias + column,
                        out + r * ldo + column, ldo, std::min(kPanel, outputs - column));
    }
}

template <class Panels, class Out>
void linear(Pool& pool, const bf16* x, long ldx, const Panels& panels, const float* bias, Out* out, long rows,
            long inputs, long outputs) {
    std::vector<bf16> padded;
    pad_rows(x, ldx, rows, inputs, padded);
    for_each_panel(pool, rows, outputs, [=](long panel, long first, long end) {
        multiply_panel(x, ldx, panels, bias, out, outputs, inputs, outputs, panel, first, end);
    });
}

template <class Panels>
void linear_panels(const void* x, long ldx, const Panels& panels, const float* bias, void* out, long ldo, long rows,
                   long inputs, long outputs, long first, long end) {
    const bf16* source = static_cast<const bf16*>(x);
    std::vector<bf16> padded;
    pad_rows(source, ldx, rows, inputs, padded);
    for (long panel = first; panel < end; ++panel) {
        multiply_panel(source, ldx, panels, bias, static_cast<bf16*>(out), ldo, inputs, outputs, panel, 0, rows);
    }
}

}  // namespace

#include "linear_bf16_entries.h"

extern "C" int fb_cpu_init() { return 0; }

#endif

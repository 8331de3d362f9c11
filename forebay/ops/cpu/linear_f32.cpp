// float32 linear: the sums of a block of rows by one panel stay in registers over all of K. Weights in bfloat16 are
// widened as they are loaded, which is exact: the results are those of the same numbers in float32.
#include "linear.h"
#if defined(FOREBAY_AMX)
#include "linear_q.h"
#endif
#include "simd.h"

namespace {

constexpr int kVecs = kPanel / W;
constexpr int kRows = W == 16 ? 12 : 3;  // kRows * kVecs sums leave room for the operands in 32 or 16 registers

template <int ROWS, class T>
void block(const float* x, long ldx, const T* panel, long inputs, const float* bias, float* out, long ldo,
           long columns) {
    Vec sum[ROWS][kVecs];
    for (auto& row : sum) {
        for (auto& s : row) s = zero();
    }
    for (long k = 0; k < inputs; ++k) {
        Vec w[kVecs];
        for (int v = 0; v < kVecs; ++v) w[v] = load(panel + k * kPanel + v * W);
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; ++r) {
            const Vec a = set1(x[r * ldx + k]);
            for (int v = 0; v < kVecs; ++v) sum[r][v] = fma(a, w[v], sum[r][v]);
        }
    }
    for (int r = 0; r < ROWS; ++r) {
        for (int v = 0; v < kVecs && v * W < columns; ++v) {
            store_part(out + r * ldo + v * W, sum[r][v] + load(bias + v * W), std::min<long>(W, columns - v * W));
        }
    }
}

template <int ROWS, class T>
void block_of(long rows, const float* x, long ldx, const T* panel, long inputs, const float* bias, float* out,
              long ldo, long columns) {
    if (rows == ROWS) {
        block<ROWS>(x, ldx, panel, inputs, bias, out, ldo, columns);
    } else if constexpr (ROWS > 1) {
        block_of<ROWS - 1>(rows, x, ldx, panel, inputs, bias, out, ldo, columns);
    }
}

template <class T>
void multiply_rows(const float* x, long ldx, const T* weights, const float* bias, float* out, long ldo, long inputs,
                   long columns, long rows) {
    for (long r = 0; r < rows; r += kRows) {
        block_of<kRows>(std::min<long>(kRows, rows - r), x + r * ldx, ldx, weights, inputs, bias, out + r * ldo, ldo,
                        columns);
    }
}

// As many rows as two blocks take cost less with bfloat16 than with float32; more are multiplied with a widened panel.
constexpr long kWidenedOnce = 2 * kRows + 1;

const float* widened(const bf16* weights, long inputs) {
    auto* out = static_cast<float*>(thread_scratch(inputs * kPanel * static_cast<long>(sizeof(float))));
    for (long i = 0; i < inputs * kPanel; i += W) store(out + i, load(weights + i));
    return out;
}

// Rows first..end by one panel.
template <class Panels>
void multiply_panel(const float* x, long ldx, const Panels& panels, const float* bias, float* out, long ldo,
                    long inputs, long outputs, long panel, long first, long end) {
    const long column = panel * kPanel;
    panels.open(panel, [&](auto opened) {
        const auto multiply = [&](const auto* weights) {
            multiply_rows(x + first * ldx, ldx, weights, bias + column, out + first * ldo + column, ldo, inputs,
                          std::min(kPanel, outputs - column), end - first);
        };
        if constexpr (std::is_same_v<decltype(opened.all()), const bf16*>) {
            if (end - first >= kWidenedOnce) return multiply(widened(opened.all(), inputs));
        }
        multiply(opened.all());
    });
}

template <class Panels>
void linear(Pool& pool, const float* x, long ldx, const Panels& panels, const float* bias, float* out, long rows,
            long inputs, long outputs) {
    for_each_panel(pool, rows, outputs, [=](long panel, long first, long end) {
        multiply_panel(x, ldx, panels, bias, out, outputs, inputs, outputs, panel, first, end);
    });
}

template <class Panels>
void linear_panels(const void* x, long ldx, const Panels& panels, const float* bias, void* out, long ldo, long rows,
                   long inputs, long outputs, long first, long end) {
    for (long panel = first; panel < end; ++panel) {
        multiply_panel(static_cast<const float*>(x), ldx, panels, bias, static_cast<float*>(out), ldo, inputs, outputs,
                       panel, 0, rows);
    }
}

template <class T>
DensePanels<T> dense(const void* packed, long inputs) {
    return {static_cast<const T*>(packed), inputs * kPanel};
}

}  // namespace

extern "C" {

// T: of the packed weight.
#define FOREBAY_LINEAR_F32(T, suffix)                                                                               \
    void fb_linear_##suffix(Pool* pool, const float* x, long ldx, const void* packed, const float* bias, float* out, \
                            long rows, long inputs, long outputs) {                                                 \
        pool->op([=](Pool& p) { linear(p, x, ldx, dense<T>(packed, inputs), bias, out, rows, inputs, outputs); });  \
    }                                                                                                               \
    void fb_linear_panels_##suffix(FOREBAY_LINEAR_PANELS) {                                                         \
        linear_panels(x, ldx, dense<T>(packed, inputs), bias, out, ldo, rows, inputs, outputs, first, end);         \
    }

FOREBAY_LINEAR_F32(float, f32)
FOREBAY_LINEAR_F32(bf16, f32_of_bf16)

#if defined(FOREBAY_AMX)

void fb_linear_q_f32(Pool* pool, const float* x, long ldx, const void* packed, const float* bias, float* out, long rows,
                     long inputs, long outputs) {
    pool->op([=](Pool& p) {
        linear(p, x, ldx, CodePanels<float>(packed, inputs), bias, out, rows, inputs, outputs);
    });
}

void fb_linear_panels_q_f32(FOREBAY_LINEAR_PANELS) {
    linear_panels(x, ldx, CodePanels<float>(packed, inputs), bias, out, ldo, rows, inputs, outputs, first, end);
}

#endif
}

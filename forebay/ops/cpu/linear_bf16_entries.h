// The C entry points of bfloat16 layers, for the file that defines how one is computed: `linear` and `linear_panels`.
#include "linear.h"

namespace {

DensePanels<bf16> dense(const void* packed, long inputs) {
    return {static_cast<const bf16*>(packed), ceil_div(inputs, kStep) * 2 * kTile};
}

}  // namespace

#define FOREBAY_LINEAR_BF16(Out, suffix)                                                                          \
    void fb_linear_##suffix(Pool* pool, const bf16* x, long ldx, const void* packed, const float* bias, Out* out, \
                            long rows, long inputs, long outputs) {                                               \
        pool->op([=](Pool& p) { linear(p, x, ldx, dense(packed, inputs), bias, out, rows, inputs, outputs); });   \
    }

extern "C" {

FOREBAY_LINEAR_BF16(bf16, bf16)
FOREBAY_LINEAR_BF16(float, bf16_f32)

void fb_linear_panels_bf16(FOREBAY_LINEAR_PANELS) {
    linear_panels(x, ldx, dense(packed, inputs), bias, out, ldo, rows, inputs, outputs, first, end);
}
}

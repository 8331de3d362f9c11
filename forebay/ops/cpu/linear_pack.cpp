#include "bf16.h"
#include "linear_bf16.h"

namespace {

// For inputs in float32.
template <class T>
void pack(Pool* pool, const T* weight, T* packed, long outputs, long inputs) {
    pool->run(ceil_div(outputs, kPanel), [=](long begin, long end) {
        for (long panel = begin; panel < end; ++panel) {
            for (long k = 0; k < inputs; ++k) {
                for (long n = 0; n < kPanel; ++n) {
                    const long row = panel * kPanel + n;
                    packed[(panel * inputs + k) * kPanel + n] = row < outputs ? weight[row * inputs + k] : T{0};
                }
            }
        }
    });
}

}  // namespace

extern "C" {

// All: weight [outputs, inputs] contiguous; packed as linear.h and linear_bf16.h say, all of it written.

void fb_pack_f32(Pool* pool, const float* weight, float* packed, long outputs, long inputs) {
    pack(pool, weight, packed, outputs, inputs);
}

void fb_pack_f32_of_bf16(Pool* pool, const bf16* weight, bf16* packed, long outputs, long inputs) {
    pack(pool, weight, packed, outputs, inputs);
}

void fb_pack_bf16(Pool* pool, const bf16* weight, bf16* packed, long outputs, long inputs) {
    const long steps = ceil_div(inputs, kStep);
    pool->run(ceil_div(outputs, kPanel), [=](long begin, long end) {
        for (long panel = begin; panel < end; ++panel) {
            bf16* out = packed + panel * steps * 2 * kTile;
            for (long step = 0; step < steps; ++step) {
                for (long n = 0; n < kPanel; ++n) {
                    const long row = panel * kPanel + n;
                    bf16* tile = out + (step * 2 + n / 16) * kTile + n % 16 * kTogether;
                    for (long i = 0; i < kStep; ++i) {
                        const long k = step * kStep + i;
                        const bool inside = row < outputs && k < inputs;
                        tile[i / kTogether * 16 * kTogether + i % kTogether] = inside ? weight[row * inputs + k] : bf16{0};
                    }
                }
            }
        }
    });
}
}

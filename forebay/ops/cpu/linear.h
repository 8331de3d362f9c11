// What the linear kernels share: the packed weight and the way its work is cut up.
//
// A weight [N, K] is cut into panels of 32 outputs; a panel lies contiguous in memory, in the order it is read, and is
// zero beyond N and K, so that one thread streams through its panels and every kernel works on whole ones.
//   float32:  [ceil(N/32)][K][32]
//             or bfloat16 in the same order, which is widened as it is read
//   bfloat16: [ceil(N/32)][ceil(K/32)][2][16][16][2]: tiles of 16 outputs by 16 pairs of inputs, as AMX and VNNI want B,
//            or by 8 fours, as BFMMLA does (linear_bf16.h)
// The bias is float32 [ceil(N/32) * 32], zero where there is none. Weights that are held in codes: codes.h.
//
// One output is always one chain of sums over k in ascending order, whatever T is: that is the batch invariance.
#pragma once

#include <algorithm>

#include "pool.h"

constexpr long kPanel = 32;  // outputs
constexpr long kStep = 32;   // inputs of one bfloat16 step
constexpr long kTile = 16 * 16 * 2;
constexpr long kGroup = 32;  // inputs of a block of codes
constexpr long kRowChunk = 256;  // rows of x that one piece of work covers without AMX: few enough to stay in L2

inline long ceil_div(long a, long b) { return (a + b - 1) / b; }

// Calls body(panel, first row, end row), panels innermost so that a chunk of x is used for all of them while cached.
template <class Body>
void for_each_panel(Pool& pool, long rows, long outputs, const Body& body) {
    const long panels = ceil_div(outputs, kPanel), items = panels * ceil_div(rows, kRowChunk);
    // One row waits for memory, which is read fastest in long pieces. With more, threads should have equal shares: of 18
    // panels in nine pieces one of two has ten.
    const long most = 8 * pool.num_threads(), grain = rows == 1 ? ceil_div(items, most) : std::max(1L, items / most);
    pool.run(items, grain, panels, [&](long begin, long end) {
        for (long item = begin; item < end; ++item) {
            const long first = item / panels * kRowChunk;
            body(item % panels, first, std::min(first + kRowChunk, rows));
        }
    });
}

// A dense weight as the kernels read it: see CodePanels in linear_q.h, which opens quantized ones.
template <class T>
struct DensePanel {
    static constexpr long kStepSize = kStep * kPanel;
    const T* data;

    const T* all() const { return data; }
    const T* step(long s) const { return data + s * kStepSize; }
};

template <class T>
class DensePanels {
  public:
    DensePanels(const T* packed, long panel_size) : packed_(packed), panel_size_(panel_size) {}

    template <class Body>
    void open(long panel, const Body& body) const {
        body(DensePanel<T>{packed_ + panel * panel_size_});
    }

  private:
    const T* packed_;
    long panel_size_;
};

// Panels first..end of a linear layer on the calling thread alone, for kernels that run many layers at once: rows of x
// and out are ldx and ldo apart, and the bits are those of the layer run whole. One such function for each form of a
// weight; of one whose inputs are rounded x is what rounded.h makes of them.
using LinearPanels = void (*)(const void* x, long ldx, const void* packed, const float* bias, void* out, long ldo,
                              long rows, long inputs, long outputs, long first, long end);

#define FOREBAY_LINEAR_PANELS                                                                                    \
    const void *x, long ldx, const void *packed, const float *bias, void *out, long ldo, long rows, long inputs, \
        long outputs, long first, long end

// A weight, its bias, and what reads them; made in Python as three addresses and a number.
struct PackedLinear {
    LinearPanels panels;
    const void* packed;
    const float* bias;
    long activation_bits;  // as in CodeHeader
};

// Adds what each token's adapter adds to a linear layer's outputs: out[t] += B[s] (A[s] x[t]) for s = slots[t] > 0.
//
// Tokens of one slot are multiplied together. One entry of A x is one sum over the inputs, W chains that are joined at the
// end; an output is one chain over the rank, which is then added to what is there. So the bits of a token depend on its
// own inputs and adapter.
#include <memory>
#include <vector>

#include "linear.h"
#include "rows.h"

namespace {

constexpr long kTokens = 32;   // of a block: few enough that their inputs stay in L2
constexpr long kInnerRows = 8;  // of A that a piece of work multiplies with
constexpr int kVecs = kPanel / W;
constexpr int kTogether = W == 16 ? 4 : 2;  // tokens whose sums stay in registers

// T: of inputs and outputs; A: of the table.
template <class T, class A>
struct Call {
    T* out;
    const T* x;
    long ldx;
    const int* slots;
    const A* a;         // [slots, layers, rank, inputs]
    const A* b;         // [slots, panels, rank, kPanel]
    const int* ranks;   // [slots, layers]
    const int* panels;  // [panels, 3]: first output, outputs, layer
    long rows;
    long inputs;
    long outputs;
    long num_slots;
    long layers;
    long rank;
    long num_panels;

    long rank_of(long slot, long layer) const { return ranks[slot * layers + layer]; }
    // A [rank, inputs] of a slot and a layer.
    const A* inner(long slot, long layer) const { return a + (slot * layers + layer) * rank * inputs; }
};

// Tokens of one slot: places first..end of an order.
struct Block {
    long slot;
    long first;
    long end;
};

// The tokens with an adapter in the order of their slots, in blocks.
struct Order {
    std::vector<long> tokens;
    std::vector<Block> blocks;

    Order(const int* slots, long rows, long num_slots) {
        std::vector<long> starts(num_slots + 1);
        for (long t = 0; t < rows; ++t) ++starts[slots[t] + 1];
        starts[1] = 0;  // of slot 0 none
        for (long s = 1; s < num_slots; ++s) starts[s + 1] += starts[s];
        tokens.resize(starts[num_slots]);
        if (tokens.empty()) return;
        std::vector<long> next(starts);
        for (long t = 0; t < rows; ++t) {
            if (slots[t] > 0) tokens[next[slots[t]]++] = t;
        }
        for (long s = 1; s < num_slots; ++s) {
            for (long first = starts[s]; first < starts[s + 1]; first += kTokens) {
                blocks.push_back({s, first, std::min(first + kTokens, starts[s + 1])});
            }
        }
    }
};

// The products of TOKENS inputs with ROWS rows of A: out[i][r] for token i.
template <int TOKENS, int ROWS, class T, class A>
void multiply_rows(const T* const* x, const A* a, long inputs, float* const* out) {
    Vec sum[TOKENS][ROWS];
    for (auto& token : sum) {
        for (auto& s : token) s = zero();
    }
    for_each_vector(inputs, [&](long k, long part) FOREBAY_INLINE_LAMBDA {
        Vec in[TOKENS];
        for (int i = 0; i < TOKENS; ++i) in[i] = load_part(x[i] + k, part);
        for (int r = 0; r < ROWS; ++r) {
            const Vec weights = load_part(a + r * inputs + k, part);
            for (int i = 0; i < TOKENS; ++i) sum[i][r] = fma(weights, in[i], sum[i][r]);
        }
    });
    for (int i = 0; i < TOKENS; ++i) {
        for (int r = 0; r < ROWS; r += 4) {
            const auto at = [&](int n) { return sum[i][std::min(r + n, ROWS - 1)]; };
            store4(out[i] + r, hsum4(at(0), at(1), at(2), at(3)), std::min(4, ROWS - r));
        }
    }
}

template <int TOKENS, int MOST, class T, class A>
void multiply_some(long rows, const T* const* x, const A* a, long inputs, float* const* out) {
    if (rows == MOST) {
        multiply_rows<TOKENS, MOST>(x, a, inputs, out);
    } else if constexpr (MOST > 1) {
        multiply_some<TOKENS, MOST - 1>(rows, x, a, inputs, out);
    }
}

// Rows first..end of A of one layer, at most kInnerRows, with the tokens of a block; inner [places, layers, rank].
template <class T, class A>
void multiply_inner(const Call<T, A>& call, const Order& order, const Block& block, long layer, long first, long end,
                    float* inner) {
    const A* a = call.inner(block.slot, layer) + first * call.inputs;
    const auto input = [&](long place) { return call.x + order.tokens[place] * call.ldx; };
    const auto output = [&](long place) { return inner + (place * call.layers + layer) * call.rank + first; };
    long place = block.first;
    for (; place + 2 <= block.end; place += 2) {
        const T* x[2] = {input(place), input(place + 1)};
        for (long r = 0; r < end - first; r += 4) {
            float* out[2] = {output(place) + r, output(place + 1) + r};
            multiply_some<2, 4>(std::min(4L, end - first - r), x, a + r * call.inputs, call.inputs, out);
        }
    }
    if (place < block.end) {
        const T* x[1] = {input(place)};
        float* out[1] = {output(place)};
        multiply_some<1, kInnerRows>(end - first, x, a, call.inputs, out);
    }
}

// One panel of B with TOKENS products of A: out[i] += B inner[i].
template <int TOKENS, class T, class A>
void multiply_outer(const float* const* inner, const A* b, long rank, T* const* out, long columns) {
    Vec sum[TOKENS][kVecs];
    for (auto& token : sum) {
        for (auto& s : token) s = zero();
    }
    for (long r = 0; r < rank; ++r) {
        for (int v = 0; v < kVecs; ++v) {
            const Vec weights = load(b + r * kPanel + v * W);
            for (int i = 0; i < TOKENS; ++i) sum[i][v] = fma(set1(inner[i][r]), weights, sum[i][v]);
        }
    }
    for (int i = 0; i < TOKENS; ++i) {
        for (int v = 0; v < kVecs && v * W < columns; ++v) {
            const long part = std::min<long>(W, columns - v * W);
            store_part(out[i] + v * W, load_part(out[i] + v * W, part) + sum[i][v], part);
        }
    }
}

template <int TOKENS, class T, class A>
void add_panel(const Call<T, A>& call, const Order& order, long panel, long slot, long& place, long end,
               const float* inner) {
    const int* where = call.panels + panel * 3;
    const A* b = call.b + (slot * call.num_panels + panel) * call.rank * kPanel;
    for (; place + TOKENS <= end; place += TOKENS) {
        const float* products[TOKENS];
        T* out[TOKENS];
        for (int i = 0; i < TOKENS; ++i) {
            products[i] = inner + ((place + i) * call.layers + where[2]) * call.rank;
            out[i] = call.out + order.tokens[place + i] * call.outputs + where[0];
        }
        multiply_outer<TOKENS>(products, b, call.rank_of(slot, where[2]), out, where[1]);
    }
}

template <class T, class A>
void add_adapters(Pool& pool, const Call<T, A>& call) {
    const Order order(call.slots, call.rows, call.num_slots);
    if (order.tokens.empty()) return;
    const auto memory = std::make_unique_for_overwrite<float[]>(order.tokens.size() * call.layers * call.rank);
    float* inner = memory.get();
    const long blocks = static_cast<long>(order.blocks.size()), tokens = order.blocks[0].end - order.blocks[0].first;
    const long pieces = ceil_div(call.rank, kInnerRows), each = call.layers * pieces;
    pool.run(blocks * each, grain_for(kInnerRows * call.inputs * tokens), each, [&](long begin, long end) {
        for (long item = begin; item < end; ++item) {
            const Block& block = order.blocks[item / each];
            const long layer = item % each / pieces, first = item % pieces * kInnerRows;
            const long stop = std::min(first + kInnerRows, call.rank_of(block.slot, layer));
            if (first < stop) multiply_inner(call, order, block, layer, first, stop, inner);
        }
    });
    pool.run(blocks * call.num_panels, grain_for(kPanel * call.rank * tokens), call.num_panels,
             [&](long begin, long end) {
                 for (long item = begin; item < end; ++item) {
                     const Block& block = order.blocks[item / call.num_panels];
                     const long panel = item % call.num_panels;
                     if (call.rank_of(block.slot, call.panels[panel * 3 + 2]) == 0) continue;
                     long place = block.first;
                     add_panel<kTogether>(call, order, panel, block.slot, place, block.end, inner);
                     add_panel<1>(call, order, panel, block.slot, place, block.end, inner);
                 }
             });
}

}  // namespace

// x rows are ldx apart, those of out `outputs`. A: of a and b; see Call for their shapes.
#define FOREBAY_ADAPTERS(T, A, suffix)                                                                                \
    void fb_add_adapters_##suffix(Pool* pool, T* out, const T* x, long ldx, const int* slots, const A* a, const A* b, \
                                  const int* ranks, const int* panels, long rows, long inputs, long outputs,          \
                                  long num_slots, long layers, long rank, long num_panels) {                          \
        const Call<T, A> call{out,  x,      ldx,     slots,     a,      b,    ranks,     panels,                      \
                              rows, inputs, outputs, num_slots, layers, rank, num_panels};                            \
        pool->op([=](Pool& p) { add_adapters(p, call); });                                                            \
    }

extern "C" {

FOREBAY_ADAPTERS(float, float, f32)
FOREBAY_ADAPTERS(float, bf16, f32_of_bf16)
FOREBAY_ADAPTERS(bf16, bf16, bf16)
}

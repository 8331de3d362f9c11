// Many linear layers of one shape at once, each on rows of its own: experts, and layers that each head has.
//
// Layers and pieces of their outputs are shared out together, so that neither a layer with one row nor one with a
// hundred leaves a thread idle. Each output is made as `linear` makes it, whoever else is in the call.
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "activations.h"
#include "linear.h"
#include "rounded.h"
#include "rows.h"

namespace {

constexpr long kJobRows = 256;    // of a job: few enough to stay in L2
constexpr long kFewPanels = 4;    // of a piece: under this its start costs more than its help
constexpr long kPiecesEach = 16;  // for every thread, so that the last ones end together

enum class Activation : long { kSiluAndMul = 0, kClampedSwiglu = 1, kRelu2 = 2, kGeluAndMul = 3 };

// Some rows through one layer.
template <class T>
struct Job {
    PackedLinear layer;
    const T* x;
    T* out;
    long rows;
    const void* input = x;  // of the layer: x, or what rounded.h makes of it
};

template <class T>
void add_jobs(std::vector<Job<T>>& jobs, const PackedLinear& layer, const T* x, long ldx, T* out, long ldo, long rows) {
    for (long first = 0; first < rows; first += kJobRows) {
        jobs.push_back({layer, x + first * ldx, out + first * ldo, std::min(kJobRows, rows - first)});
    }
}

// Rounds the inputs of the layers that want them so, into the memory that it returns.
template <class T>
std::vector<uint8_t> rounded(Pool& pool, std::vector<Job<T>>& jobs, long ldx, long inputs) {
    std::vector<long> starts{0};
    for (const Job<T>& job : jobs) {
        const long bits = job.layer.activation_bits;
        starts.push_back(starts.back() + (bits ? rounded_bytes(bits, job.rows, inputs) : 0));
    }
    std::vector<uint8_t> memory(starts.back());
    if (memory.empty()) return memory;
    const long count = static_cast<long>(jobs.size());
    pool.run(count, grain_for(inputs * kMostRows), [&](long begin, long end) {
        for (long i = begin; i < end; ++i) {
            Job<T>& job = jobs[i];
            if (job.layer.activation_bits == 0) continue;
            job.input = memory.data() + starts[i];
            round_rows(job.x, ldx, job.rows, inputs, job.layer.activation_bits, memory.data() + starts[i]);
        }
    });
    return memory;
}

template <class T>
void run_jobs(Pool& pool, std::vector<Job<T>>& jobs, long ldx, long ldo, long inputs, long outputs) {
    if (jobs.empty()) return;
    const std::vector<uint8_t> memory = rounded(pool, jobs, ldx, inputs);
    const long count = static_cast<long>(jobs.size()), panels = ceil_div(outputs, kPanel);
    const long wanted = ceil_div(kPiecesEach * pool.num_threads(), count);
    const long pieces = std::clamp(wanted, 1L, ceil_div(panels, kFewPanels));
    pool.run(count * pieces, 1, pieces, [&](long begin, long end) {
        for (long item = begin; item < end; ++item) {
            const Job<T>& job = jobs[item / pieces];
            const long piece = item % pieces;
            job.layer.panels(job.input, ldx, job.layer.packed, job.layer.bias, job.out, ldo, job.rows, inputs, outputs,
                             piece * panels / pieces, (piece + 1) * panels / pieces);
        }
    });
}

// Which rows each expert has: `entries` are numbers of (token, choice) pairs, those of expert e at
// starts[e]..starts[e+1] in ascending order; place[i] is where entry i stands.
struct Order {
    std::vector<long> starts;
    std::vector<long> entries;
    std::vector<long> place;

    Order(const int64_t* ids, long count, long experts) : starts(experts + 1), entries(count), place(count) {
        for (long i = 0; i < count; ++i) ++starts[ids[i] + 1];
        for (long e = 0; e < experts; ++e) starts[e + 1] += starts[e];
        std::vector<long> next(starts.begin(), starts.end() - 1);
        for (long i = 0; i < count; ++i) {
            place[i] = next[ids[i]]++;
            entries[place[i]] = i;
        }
    }
};

template <class T>
struct Call {
    const T* x;
    long ldx;
    const PackedLinear* gate_up;
    const PackedLinear* down;
    const int64_t* ids;    // [tokens, choices]
    const float* weights;  // [tokens, choices]
    T* out;
    long tokens;
    long choices;
    long experts;
    long hidden;
    long width;  // of gate_up's outputs
    long intermediate;
    Activation activation;
    float alpha;
    float limit;
    float offset;

    long rows() const { return tokens * choices; }
    Order order() const { return Order(ids, rows(), experts); }
};

template <class T>
void gather(Pool& pool, const Call<T>& call, const Order& order, T* rows) {
    pool.run(call.tokens * call.choices, grain_for(call.hidden), [&](long begin, long end) {
        for (long r = begin; r < end; ++r) {
            std::copy_n(call.x + order.entries[r] / call.choices * call.ldx, call.hidden, rows + r * call.hidden);
        }
    });
}

template <class T>
void activate(Pool& pool, const Call<T>& call, const T* x, T* out) {
    const long rows = call.tokens * call.choices, ldx = call.width, n = call.intermediate;
    switch (call.activation) {
        case Activation::kSiluAndMul:
            return zip_rows(pool, x, ldx, x + n, ldx, out, n, rows, n,
                            [](Vec gate, Vec up) { return silu(gate) * up; });
        case Activation::kClampedSwiglu: {
            const Vec alpha = set1(call.alpha), limit = set1(call.limit), offset = set1(call.offset);
            return zip_rows(pool, x, ldx, x + n, ldx, out, n, rows, n,
                            [=](Vec gate, Vec up) { return clamped_swiglu(gate, up, alpha, limit, offset); });
        }
        case Activation::kRelu2:
            return zip_rows(pool, x, ldx, x, ldx, out, n, rows, n, [](Vec a, Vec) { return relu2(a); });
        case Activation::kGeluAndMul:
            return zip_rows(pool, x, ldx, x + n, ldx, out, n, rows, n,
                            [](Vec gate, Vec up) { return gelu_tanh(gate) * up; });
    }
}

template <class T>
void run_layers(Pool& pool, const Order& order, const PackedLinear* layers, const T* x, T* out, long inputs,
                long outputs) {
    std::vector<Job<T>> jobs;
    for (long e = 0; e + 1 < static_cast<long>(order.starts.size()); ++e) {
        const long first = order.starts[e];
        add_jobs(jobs, layers[e], x + first * inputs, inputs, out + first * outputs, outputs,
                 order.starts[e + 1] - first);
    }
    run_jobs(pool, jobs, inputs, outputs, inputs, outputs);
}

// out[t] = sum over j in order of weights[t, j] * y[place[t, j]].
template <class T>
void combine(Pool& pool, const Call<T>& call, const Order& order, const T* y) {
    const long n = call.hidden, choices = call.choices;
    pool.run(call.tokens, grain_for(n * choices), [&](long begin, long end) {
        for (long t = begin; t < end; ++t) {
            for_each_vector(n, [&](long i, long part) {
                Vec sum = zero();
                for (long j = t * choices; j < (t + 1) * choices; ++j) {
                    sum = sum + load_part(y + order.place[j] * n + i, part) * set1(call.weights[j]);
                }
                store_part(call.out + t * n + i, sum, part);
            });
        }
    });
}

// inner [rows, intermediate], in the order of the experts; x is memory for [rows, hidden], wide for [rows, width].
template <class T>
void inside(Pool& pool, const Call<T>& call, const Order& order, T* x, T* wide, T* inner) {
    gather(pool, call, order, x);
    run_layers(pool, order, call.gate_up, x, wide, call.hidden, call.width);
    activate(pool, call, wide, inner);
}

// y is memory for [rows, hidden].
template <class T>
void outside(Pool& pool, const Call<T>& call, const Order& order, const T* inner, T* y) {
    run_layers(pool, order, call.down, inner, y, call.intermediate, call.hidden);
    combine(pool, call, order, y);
}

template <class T>
void fused_experts(Pool& pool, const Call<T>& call) {
    const Order order = call.order();
    const auto memory =
        std::make_unique_for_overwrite<T[]>(call.rows() * (call.hidden + call.width + call.intermediate));
    T* x = memory.get();  // and what comes out in the end
    T* wide = x + call.rows() * call.hidden;
    T* inner = wide + call.rows() * call.width;
    inside(pool, call, order, x, wide, inner);
    outside(pool, call, order, inner, x);
}

template <class T>
void linear_heads(Pool& pool, const T* x, long ldx, long head_stride, const PackedLinear* layers, T* out, long rows,
                  long heads, long inputs, long outputs) {
    std::vector<Job<T>> jobs;
    for (long h = 0; h < heads; ++h) {
        add_jobs(jobs, layers[h], x + h * head_stride, ldx, out + h * outputs, heads * outputs, rows);
    }
    run_jobs(pool, jobs, ldx, heads * outputs, inputs, outputs);
}

}  // namespace

// fused_experts: x rows are ldx apart; gate_up and down [experts], ids and weights [rows, choices], out [rows, hidden].
// experts_inside and experts_outside: the parts of it before and behind `inner` [rows * choices, intermediate].
// linear_heads: x[row, head] at row * ldx + head * head_stride, layers [heads], out [rows, heads, outputs].
#define FOREBAY_EXPERTS(T, suffix)                                                                                    \
    void fb_fused_experts_##suffix(Pool* pool, const T* x, long ldx, const PackedLinear* gate_up,                     \
                                   const PackedLinear* down, const int64_t* ids, const float* weights, T* out,        \
                                   long rows, long choices, long experts, long hidden, long width, long intermediate, \
                                   long activation, float alpha, float limit, float offset) {                         \
        const Call<T> call{x,     ldx,     gate_up, down,   ids,   weights,      out,                                 \
                           rows,  choices, experts, hidden, width, intermediate, static_cast<Activation>(activation), \
                           alpha, limit, offset};                                                                     \
        pool->op([=](Pool& p) { fused_experts(p, call); });                                                           \
    }                                                                                                                 \
    void fb_experts_inside_##suffix(Pool* pool, const T* x, long ldx, const PackedLinear* gate_up, const int64_t* ids, \
                                    T* inner, long rows, long choices, long experts, long hidden, long width,         \
                                    long intermediate, long activation, float alpha, float limit, float offset) {     \
        const Call<T> call{x,    ldx,     gate_up, nullptr, ids,   nullptr,      nullptr,                             \
                           rows, choices, experts, hidden,  width, intermediate, static_cast<Activation>(activation), \
                           alpha, limit, offset};                                                                     \
        pool->op([=](Pool& p) {                                                                                       \
            const auto memory = std::make_unique_for_overwrite<T[]>(call.rows() * (call.hidden + call.width));        \
            inside(p, call, call.order(), memory.get(), memory.get() + call.rows() * call.hidden, inner);             \
        });                                                                                                           \
    }                                                                                                                 \
    void fb_experts_outside_##suffix(Pool* pool, const T* inner, const PackedLinear* down, const int64_t* ids,        \
                                     const float* weights, T* out, long rows, long choices, long experts,             \
                                     long hidden, long intermediate) {                                                \
        const Call<T> call{nullptr, 0, nullptr, down, ids, weights, out, rows, choices, experts, hidden, 0,           \
                           intermediate, Activation::kSiluAndMul, 0, 0, 0};                                           \
        pool->op([=](Pool& p) {                                                                                       \
            const auto memory = std::make_unique_for_overwrite<T[]>(call.rows() * call.hidden);                       \
            outside(p, call, call.order(), inner, memory.get());                                                      \
        });                                                                                                           \
    }                                                                                                                 \
    void fb_linear_heads_##suffix(Pool* pool, const T* x, long ldx, long head_stride, const PackedLinear* layers,     \
                                  T* out, long rows, long heads, long inputs, long outputs) {                         \
        pool->op([=](Pool& p) { linear_heads(p, x, ldx, head_stride, layers, out, rows, heads, inputs, outputs); });  \
    }

extern "C" {

FOREBAY_EXPERTS(float, f32)
FOREBAY_EXPERTS(bf16, bf16)
}

// The depthwise causal convolution of recurrent layers. Channels do not touch each other: a part is some of them, for all
// sequences.
#include "activations.h"
#include "recurrence.h"

namespace {

constexpr long kChannels = 128;  // of a part
constexpr long kTokens = 16;     // of a tile: its inputs stay in L1 while the part's vectors pass over them
constexpr int kMostTaps = 10;

template <class T>
struct Conv {
    const T* x;
    long ldx;
    const T* weight;  // [taps, channels]
    const T* bias;    // [channels], or null
    T* state;         // [slots, taps - 1, channels]
    StateBatch batch;
    T* out;
    long channels;
    long taps;
    bool silu;
};

// One sequence's inputs from channel `first` on: its tokens, and before them its state.
template <class T>
struct Inputs {
    const T* x;
    long ldx;
    T* state;
    long channels;
    long past;   // taps - 1
    long begin;  // the sequence's first token

    const T* row(long t) const {
        return t >= begin ? x + t * ldx : state + (past + t - begin) * channels;
    }
};

template <int kTaps, class T>
void convolve_tile(const Conv<T>& conv, const Inputs<T>& inputs, long from, long to, long first, long count) {
    for_each_vector(count, [&](long i, long part) FOREBAY_INLINE_LAMBDA {
        Vec weight[kTaps], window[kTaps];
        const Vec bias = conv.bias == nullptr ? zero() : load_part(conv.bias + first + i, part);
        for (int j = 0; j < kTaps; ++j) weight[j] = load_part(conv.weight + j * conv.channels + first + i, part);
        for (int j = 1; j < kTaps; ++j) window[j] = load_part(inputs.row(from - kTaps + j) + i, part);
        for (long t = from; t < to; ++t) {
            for (int j = 1; j < kTaps; ++j) window[j - 1] = window[j];
            window[kTaps - 1] = load_part(inputs.row(t) + i, part);
            Vec sum = bias;
            for (int j = 0; j < kTaps; ++j) sum = fma(window[j], weight[j], sum);
            store_part(conv.out + t * conv.channels + first + i, conv.silu ? silu(sum) : sum, part);
        }
    });
}

// The state after the tokens before `end`. What moves up within a slot comes from behind.
template <class T>
void store_state(const Conv<T>& conv, const Inputs<T>& inputs, long slot, long end, long first, long count) {
    if (slot == 0) return;  // C14
    T* to = conv.state + slot * inputs.past * conv.channels + first;
    for (long j = 0; j < inputs.past; ++j) {
        std::copy_n(inputs.row(end - inputs.past + j), count, to + j * conv.channels);
    }
}

template <int kTaps, class T>
void convolve_sequence(const Conv<T>& conv, long seq, long first, long count) {
    const StateBatch& batch = conv.batch;
    const long begin = batch.q_start[seq], end = batch.q_stop[seq], past = kTaps - 1;
    if (begin == end) return;
    T* const state = conv.state + batch.slots[seq] * past * conv.channels + first;
    const Inputs<T> inputs{conv.x + first, conv.ldx, state, conv.channels, past, begin};
    for (long t = begin; t < end; t += kTokens) {
        convolve_tile<kTaps>(conv, inputs, t, std::min(t + kTokens, end), first, count);
    }
    for (long i = batch.snap_start[seq]; i < batch.snap_start[seq + 1]; ++i) {
        store_state(conv, inputs, batch.snap_slots[i], batch.snap_ends[i], first, count);
    }
    store_state(conv, inputs, batch.write_slots[seq], end, first, count);
}

template <int kTaps, class T>
void convolve(Pool& pool, const Conv<T>& conv) {
    if constexpr (kTaps <= kMostTaps) {
        if (conv.taps != kTaps) return convolve<kTaps + 1>(pool, conv);
        pool.run((conv.channels + kChannels - 1) / kChannels, 1, [&](long part, long end) {
            for (; part < end; ++part) {
                const long first = part * kChannels, count = std::min(kChannels, conv.channels - first);
                for (long s = 0; s < conv.batch.num_seqs; ++s) convolve_sequence<kTaps>(conv, s, first, count);
            }
        });
    }
}

}  // namespace

// x rows are ldx apart; weight [taps, channels], bias [channels] or null, state [slots, taps - 1, channels],
// out [tokens, channels]. 2 to 10 taps.
#define FOREBAY_CONV(T, suffix)                                                                                       \
    extern "C" void fb_causal_conv_##suffix(Pool* pool, const T* x, long ldx, const T* weight, const T* bias,         \
                                            T* state, FOREBAY_BATCH, T* out, long channels, long taps, long silu) {   \
        pool->op([=](Pool& p) {                                                                                       \
            convolve<2>(                                                                                              \
                p, Conv<T>{x, ldx, weight, bias, state, FOREBAY_BATCH_OF_ARGUMENTS, out, channels, taps, silu != 0}); \
        });                                                                                                           \
    }

FOREBAY_CONV(float, f32)
FOREBAY_CONV(bf16, bf16)

// The depthwise causal convolution of recurrent layers.
#include "activations.h"
#include "recurrence.h"

namespace {

constexpr long kChannels = 128;  // that one thread takes at a time
constexpr long kMostTaps = 8;

template <class T>
struct Conv {
    const T* x;
    long ldx;
    const T* weight;  // [channels, taps]
    const T* bias;    // [channels], or null
    T* state;         // [slots, channels, taps - 1]
    T* out;
    long channels;
    long taps;
    bool silu;
    StateBatch batch;
};

// One part's working memory, from the thread's scratch.
template <class T>
struct Work {
    float* weight;  // [taps][kChannels]
    float* bias;    // [kChannels]
    T* history;     // [taps - 1][kChannels]: the inputs before the step, the oldest first

    explicit Work(long taps) {
        weight = static_cast<float*>(thread_scratch((2 * taps + 1) * kChannels * sizeof(float)));
        bias = weight + taps * kChannels;
        history = reinterpret_cast<T*>(bias + kChannels);
    }
};

template <class T>
void load_weights(const Conv<T>& conv, long first, long count, const Work<T>& work) {
    for (long j = 0; j < conv.taps; ++j) {
        for (long c = 0; c < count; ++c) {
            work.weight[j * kChannels + c] = to_float(conv.weight[(first + c) * conv.taps + j]);
        }
    }
    for (long c = 0; c < count; ++c) work.bias[c] = conv.bias == nullptr ? 0.0f : to_float(conv.bias[first + c]);
}

// One sequence's inputs in channels first..first + count: those before the step are in the history.
template <class T>
struct Inputs {
    const Conv<T>& conv;
    const Work<T>& work;
    long first;
    long begin;  // the sequence's first token

    const T* row(long t) const {
        if (t >= begin) return conv.x + t * conv.ldx + first;
        return work.history + (conv.taps - 1 + t - begin) * kChannels;
    }
};

template <class T>
void load_history(const Conv<T>& conv, long slot, long first, long count, const Work<T>& work) {
    const long past = conv.taps - 1;
    const T* from = conv.state + (slot * conv.channels + first) * past;
    for (long j = 0; j < past; ++j) {
        for (long c = 0; c < count; ++c) work.history[j * kChannels + c] = from[c * past + j];
    }
}

// The state after the tokens before `end`.
template <class T>
void store_history(const Inputs<T>& inputs, long slot, long count, long end) {
    const long past = inputs.conv.taps - 1;
    T* to = inputs.conv.state + (slot * inputs.conv.channels + inputs.first) * past;
    for (long j = 0; j < past; ++j) {
        const T* from = inputs.row(end - past + j);
        for (long c = 0; c < count; ++c) to[c * past + j] = from[c];
    }
}

// kTaps 0: as many as the weight has.
template <int kTaps, class T>
void convolve_tokens(const Inputs<T>& inputs, long from, long to, long count) {
    const Conv<T>& conv = inputs.conv;
    const long taps = kTaps > 0 ? kTaps : conv.taps;
    for (long t = from; t < to; ++t) {
        const T* rows[kMostTaps];
        for (long j = 0; j < taps; ++j) rows[j] = inputs.row(t - (taps - 1) + j);
        T* out = conv.out + t * conv.channels + inputs.first;
        for_each_vector(count, [&](long i, long part) FOREBAY_INLINE_LAMBDA {
            Vec sum = load(inputs.work.bias + i);
            for (long j = 0; j < taps; ++j) {
                sum = fma(load_part(rows[j] + i, part), load(inputs.work.weight + j * kChannels + i), sum);
            }
            store_part(out + i, conv.silu ? silu(sum) : sum, part);
        });
    }
}

template <class T>
void convolve_sequence(const Conv<T>& conv, long seq, long first, long count, const Work<T>& work) {
    const long begin = conv.batch.q_start[seq], slot = conv.batch.slots[seq];
    if (begin == conv.batch.q_start[seq + 1]) return;
    load_history(conv, slot, first, count, work);
    const Inputs<T> inputs{conv, work, first, begin};
    long done = begin;
    for_each_stretch(
        conv.batch, seq,
        [&](long from, long to) {
            if (conv.taps == 4) {
                convolve_tokens<4>(inputs, from, to, count);
            } else {
                convolve_tokens<0>(inputs, from, to, count);
            }
            done = to;
        },
        [&](long snapshot) { store_history(inputs, snapshot, count, done); });
    if (slot != 0) store_history(inputs, slot, count, done);
}

template <class T>
void convolve(Pool& pool, const Conv<T>& conv) {
    pool.run((conv.channels + kChannels - 1) / kChannels, 1, [&](long part, long end) {
        const Work<T> work(conv.taps);
        for (; part < end; ++part) {
            const long first = part * kChannels, count = std::min(kChannels, conv.channels - first);
            load_weights(conv, first, count, work);
            for (long s = 0; s < conv.batch.num_seqs; ++s) convolve_sequence(conv, s, first, count, work);
        }
    });
}

}  // namespace

// x rows are ldx apart; weight [channels, taps], bias [channels] or null, state [slots, channels, taps - 1],
// out [tokens, channels]. At most 8 taps.
#define FOREBAY_CONV(T, suffix)                                                                                    \
    extern "C" void fb_causal_conv_##suffix(Pool* pool, const T* x, long ldx, const T* weight, const T* bias,      \
                                            T* state, FOREBAY_BATCH, T* out, long channels, long taps, long silu) { \
        convolve(*pool, Conv<T>{x, ldx, weight, bias, state, out, channels, taps, silu != 0,                       \
                                FOREBAY_BATCH_OF_ARGUMENTS});                                                      \
    }

FOREBAY_CONV(float, f32)
FOREBAY_CONV(bf16, bf16)

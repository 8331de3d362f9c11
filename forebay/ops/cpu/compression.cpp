// Compressed attention (DeepSeek-V4, section 2.3): a block of tokens becomes one entry, and queries read the last tokens
// and entries with one softmax. What the arrays hold is said in ops/reference/compression.py.
//
// A query's keys are taken one after the other, first those of tokens, then entries: its bits depend on nobody else.
#include <cmath>
#include <limits>

#include "attention.h"
#include "pool.h"
#include "rows.h"

namespace {

struct Ring {
    long places;
    bool by_row;
};

// The pages of a request row, as the caches have them.
struct Pages {
    const int32_t* table;
    const int32_t* map;  // or null
    long size;

    long of(long position) const {
        const long page = table[position / size];
        return map == nullptr ? page : map[page];
    }
    long slot(long position) const { return of(position) * size + position % size; }
};

long sequence_of(const int32_t* q_start, long num_seqs, long token) {
    return std::upper_bound(q_start, q_start + num_seqs, token) - q_start - 1;
}

struct BlockPlan {
    int64_t* tokens;  // [most, span], and so are places, in_step and exists
    int64_t* places;
    bool* in_step;
    bool* exists;
    int64_t* first;
    int64_t* loc;
    int64_t* kept_at;
    long most;
    long span;
    long rate;

    // Block `m` is that which `token`, at `position`, ends; `before` tokens of its sequence stand before it in the step.
    template <class Place>
    void add(long m, long token, long position, long before, const Place& place) const {
        for (long b = 0; b < span; ++b) {
            const long back = span - 1 - b, i = m * span + b;
            exists[i] = position >= back;
            in_step[i] = back <= before;
            tokens[i] = in_step[i] ? token - back : 0;
            places[i] = exists[i] && !in_step[i] ? place(position - back) : 0;
        }
        first[m] = position - rate + 1;
    }

    void fill(long from) const {
        std::fill(tokens + from * span, tokens + most * span, 0);
        std::fill(places + from * span, places + most * span, 0);
        std::fill(in_step + from * span, in_step + most * span, false);
        std::fill(exists + from * span, exists + most * span, false);
        std::fill(first + from, first + most, 0);
        std::fill(loc + from, loc + most, 0);
    }
};

// A row of a step's own states, or of what a ring keeps.
template <class T>
struct States {
    const T* own;
    long stride;
    T* kept;
};

template <class T>
struct Compress {
    States<T> kv;
    States<T> gate;
    const float* bias;  // [rate, width]
    const int64_t* tokens;
    const int64_t* places;
    const bool* in_step;
    const bool* exists;
    long span;
    long rate;
    long size;
    long width;

    const T* row(const States<T>& states, long i) const {
        return in_step[i] ? states.own + tokens[i] * states.stride : states.kept + places[i] * width;
    }
    // Of a block before, the first channels are meant, of the own one the last.
    long channels(long b) const { return span > rate && b >= rate ? size : 0; }

    void entry(long m, T* out) const {
        const long first = m * span;
        for_each_vector(size, [&](long i, long part) {
            Vec top = set1(-std::numeric_limits<float>::infinity());
            for (long b = 0; b < span; ++b) {
                if (exists[first + b]) top = max(top, gated(first, b, i, part));
            }
            Vec total = zero(), sum = zero();
            for (long b = 0; b < span; ++b) {
                if (!exists[first + b]) continue;
                const Vec weight = exp(gated(first, b, i, part) - top);
                total = total + weight;
                sum = fma(weight, load_part(row(kv, first + b) + channels(b) + i, part), sum);
            }
            store_part(out + i, sum / total, part);
        });
    }

    Vec gated(long first, long b, long i, long part) const {
        const long at = channels(b) + i;
        return load_part(row(gate, first + b) + at, part) + load_part(bias + b % rate * width + at, part);
    }
};

template <class T>
void compress(Pool& pool, const Compress<T>& call, const int64_t* kept_at, T* out, long most, long num_tokens) {
    pool.run(most, 1, [=](long begin, long end) {
        for (long m = begin; m < end; ++m) {
            if (call.exists[(m + 1) * call.span - 1]) {
                call.entry(m, out + m * call.size);
            } else {
                std::fill_n(out + m * call.size, call.size, T{});
            }
        }
    });
    // Behind all that is read: place 0 is nobody's.
    pool.run(num_tokens, grain_for(2 * call.width), [=](long begin, long end) {
        for (long t = begin; t < end; ++t) {
            if (kept_at[t] == 0) continue;
            for (const States<T>& states : {call.kv, call.gate}) {
                std::copy_n(states.own + t * states.stride, call.width, states.kept + kept_at[t] * call.width);
            }
        }
    });
}

template <class T>
void unrotate_head(T* x, const float* cos_sin_row, long half) {
    for_each_vector(half, [&](long i, long part) {
        const Vec cos = load_part(cos_sin_row + i, part), sin = load_part(cos_sin_row + half + i, part);
        const Vec first = load_part(x + i, part), second = load_part(x + half + i, part);
        store_part(x + i, first * cos + second * sin, part);
        store_part(x + half + i, second * cos - first * sin, part);
    });
}

constexpr long kHeads = 8;  // that read a key together

template <class E>
void open_key(const Cache<E>& cache, long slot, long dim, float* key) {
    const E* at = cache.head(slot, 0);
    if constexpr (sizeof(E) == 1) {
        const float factor = cache.factor(slot, 0);
        for (long i = 0; i < dim; ++i) key[i] = static_cast<float>(at[i]) * factor;
    } else {
        for_each_vector(dim, [&](long i, long part) { store_part(key + i, load_part(at + i, part), part); });
    }
}

float dot(const float* a, const float* b, long n) {
    Vec even = zero(), odd = zero();
    long i = 0;
    for (; i + 2 * W <= n; i += 2 * W) {
        even = fma(load(a + i), load(b + i), even);
        odd = fma(load(a + i + W), load(b + i + W), odd);
    }
    for_each_vector(n - i, [&](long j, long part) {
        even = fma(load_part(a + i + j, part), load_part(b + i + j, part), even);
    });
    return hsum(even + odd);
}

template <class T, class E>
struct Attention {
    const T* q;  // [tokens, heads, dim]
    const int64_t* positions;
    Cache<E> tokens;
    Pages pages;  // `table` is that of all rows
    long pages_per_row;
    const int32_t* rows;
    const int32_t* q_start;
    long num_seqs;
    long window;
    Cache<E> entries;
    Pages entry_pages;
    long entry_pages_per_row;
    const int32_t* entry_rows;
    const int32_t* entry_lens;
    float scale;
    const float* sinks;
    T* out;
    long heads;
    long dim;

    // The heads first..first + count of a token.
    void run(long token, long first, long count) const {
        const long own = sequence_of(q_start, num_seqs, token), position = positions[token], packed = entry_lens[token];
        T* to = out + (token * heads + first) * dim;
        if (packed < 0) {
            for (long i = 0; i < count * dim; i += dim) {
                for_each_vector(dim, [&](long j, long part) {
                    store_part(to + i + j, set1(std::numeric_limits<float>::quiet_NaN()), part);
                });
            }
            return;
        }
        const Pages of_tokens{pages.table + rows[own] * pages_per_row, pages.map, pages.size};
        const Pages of_entries{entry_pages.table + entry_rows[token] * entry_pages_per_row, entry_pages.map,
                               entry_pages.size};
        const long oldest = std::max(0L, position - window + 1), seen = position + 1 - oldest, n = seen + packed;
        auto* q_rows = static_cast<float*>(thread_scratch((count * (2 * dim + n) + dim) * sizeof(float)));
        float *sums = q_rows + count * dim, *key = sums + count * dim, *weights = key + dim;
        const auto open = [&](long i) {
            i < seen ? open_key(tokens, of_tokens.slot(oldest + i), dim, key)
                     : open_key(entries, of_entries.slot(i - seen), dim, key);
        };
        const T* from = q + (token * heads + first) * dim;
        for_each_vector(count * dim, [&](long i, long part) { store_part(q_rows + i, load_part(from + i, part), part); });
        for (long i = 0; i < n; ++i) {
            open(i);
            for (long h = 0; h < count; ++h) weights[h * n + i] = dot(q_rows + h * dim, key, dim) * scale;
        }
        for (long h = 0; h < count; ++h) soften(weights + h * n, n, sinks[first + h]);
        std::fill_n(sums, count * dim, 0.0f);
        for (long i = 0; i < n; ++i) {
            open(i);
            for (long h = 0; h < count; ++h) {
                const Vec weight = set1(weights[h * n + i]);
                float* sum = sums + h * dim;
                for_each_vector(dim, [&](long j, long part) {
                    store_part(sum + j, fma(weight, load_part(key + j, part), load_part(sum + j, part)), part);
                });
            }
        }
        for_each_vector(count * dim, [&](long i, long part) { store_part(to + i, load_part(sums + i, part), part); });
    }

    // Scores become weights.
    static void soften(float* scores, long n, float sink) {
        float top = sink;
        for (long i = 0; i < n; ++i) top = std::max(top, scores[i]);
        Vec sums = zero();
        for_each_vector(n, [&](long i, long part) {
            store_part(scores + i, exp(load_part(scores + i, part) - set1(top)), part);
            sums = sums + load_part(scores + i, part);
        });
        const Vec total = set1(hsum(sums) + std::exp(sink - top));
        for_each_vector(n, [&](long i, long part) { store_part(scores + i, load_part(scores + i, part) / total, part); });
    }
};

template <class T, class E>
void attend(Pool& pool, const Attention<T, E>& call, long num_tokens) {
    const long groups = (call.heads + kHeads - 1) / kHeads;
    pool.run(num_tokens * groups, 1, [=](long begin, long end) {
        for (long i = begin; i < end; ++i) {
            const long first = i % groups * kHeads;
            call.run(i / groups, first, std::min(kHeads, call.heads - first));
        }
    });
}

}  // namespace

extern "C" void fb_plan_blocks(Pool* pool, const int64_t* positions, const int64_t* loc, const int32_t* page_table,
                               long pages_per_row, const int32_t* page_map, const int32_t* rows,
                               const int32_t* q_start, long num_seqs, long page_size, long rate, long span, long ring,
                               long by_row, long most, int64_t* tokens, int64_t* places, bool* in_step, bool* exists,
                               int64_t* first, int64_t* entry_loc, int64_t* kept_at) {
    const BlockPlan plan{tokens, places, in_step, exists, first, entry_loc, kept_at, most, span, rate};
    pool->op([=](Pool&) {
        long m = 0;
        for (long s = 0; s < num_seqs; ++s) {
            const Pages pages{page_table + rows[s] * pages_per_row, page_map, page_size};
            const auto place = [&](long position) {
                return (by_row != 0 ? rows[s] : pages.of(position)) * ring + position % ring;
            };
            for (long t = q_start[s]; t < q_start[s + 1]; ++t) {
                const long position = positions[t];
                const bool real = loc[t] >= page_size;
                long behind = q_start[s + 1] - 1 - t;
                if (by_row == 0) behind = std::min(behind, page_size - 1 - position % page_size);
                plan.kept_at[t] = real && behind < ring ? place(position) : 0;
                if (!real || (position + 1) % rate != 0) continue;
                plan.loc[m] = loc[t] / rate;
                plan.add(m++, t, position, t - q_start[s], place);
            }
        }
        plan.fill(m);
    });
}

extern "C" void fb_entry_pages(Pool* pool, const int64_t* positions, const int32_t* rows, const int32_t* q_start,
                               long num_seqs, long rate, int32_t* token_rows, int32_t* token_start, int32_t* lens) {
    pool->op([=](Pool&) {
        const long num_tokens = q_start[num_seqs];
        for (long t = 0; t < num_tokens; ++t) {
            token_rows[t] = rows[sequence_of(q_start, num_seqs, t)];
            token_start[t] = static_cast<int32_t>(t);
            lens[t] = static_cast<int32_t>((positions[t] + 1) / rate);
        }
        token_start[num_tokens] = static_cast<int32_t>(num_tokens);
    });
}

// What a selection of `counts` of `seen` leaves: -1 where it failed.
extern "C" void fb_selected_lens(Pool* pool, const int32_t* seen, const int32_t* counts, int32_t* lens, long tokens) {
    pool->op([=](Pool&) {
        for (long t = 0; t < tokens; ++t) lens[t] = seen[t] == 0 ? 0 : counts[t] == 0 ? -1 : counts[t];
    });
}

// Rings `kept` have a place for each of a token's positions. Place 0 is nobody's.
extern "C" void fb_first_positions(Pool* pool, const int64_t* positions, long axis_stride, long token_stride, long axes,
                                   float* kept, long num_tokens, const int64_t* tokens, const int64_t* places,
                                   const bool* in_step, const bool* exists, const int64_t* kept_at, long most,
                                   long span, int64_t* out) {
    pool->op([=](Pool&) {
        for (long m = 0; m < most; ++m) {
            const long first = m * span;
            for (long a = 0; a < axes; ++a) {
                const int64_t own = positions[a * axis_stride + tokens[first] * token_stride];
                const int64_t before = static_cast<int64_t>(kept[places[first] * axes + a]);
                out[a * most + m] = !exists[first] ? 0 : in_step[first] ? own : before;
            }
        }
        for (long t = 0; t < num_tokens; ++t) {
            if (kept_at[t] == 0) continue;
            for (long a = 0; a < axes; ++a) {
                kept[kept_at[t] * axes + a] = static_cast<float>(positions[a * axis_stride + t * token_stride]);
            }
        }
    });
}

#define FOREBAY_COMPRESSION(T, suffix)                                                                               \
    extern "C" void fb_compress_##suffix(Pool* pool, const T* kv, long ldkv, const T* gate, long ldgate,             \
                                         const float* bias, T* kept_kv, T* kept_gate, const int64_t* tokens,         \
                                         const int64_t* places, const bool* in_step, const bool* exists,             \
                                         const int64_t* kept_at, T* out, long most, long span, long rate, long size, \
                                         long width, long num_tokens) {                                              \
        const Compress<T> call{{kv, ldkv, kept_kv}, {gate, ldgate, kept_gate}, bias, tokens, places, in_step,        \
                               exists,              span,                      rate, size,   width};                 \
        pool->op([=](Pool& p) { compress(p, call, kept_at, out, most, num_tokens); });                               \
    }                                                                                                                \
    extern "C" void fb_unrotate_##suffix(Pool* pool, T* x, long ldx, long heads, long dim, const int64_t* positions, \
                                         const float* cos_sin, long rotary_dim, long tokens) {                       \
        pool->op([=](Pool& p) {                                                                                      \
            p.run(tokens, grain_for(heads * rotary_dim), [=](long begin, long end) {                                 \
                for (long t = begin; t < end; ++t) {                                                                 \
                    for (long h = 0; h < heads; ++h) {                                                               \
                        unrotate_head(x + t * ldx + h * dim, cos_sin + positions[t] * rotary_dim, rotary_dim / 2);   \
                    }                                                                                                \
                }                                                                                                    \
            });                                                                                                      \
        });                                                                                                          \
    }

FOREBAY_COMPRESSION(float, f32)
FOREBAY_COMPRESSION(bf16, bf16)

#define FOREBAY_COMPRESSED_ATTENTION(T, E, suffix)                                                                   \
    extern "C" void fb_compressed_attention_##suffix(                                                                \
        Pool* pool, const T* q, const int64_t* positions, const E* keys, long slot, const float* factors,            \
        const int32_t* page_table, long pages_per_row, const int32_t* page_map, const int32_t* rows,                 \
        const int32_t* q_start, long num_seqs, long page_size, long window, const E* entries, long entry_slot,       \
        const float* entry_factors, const int32_t* entry_table, long entry_pages_per_row, const int32_t* entry_rows, \
        const int32_t* entry_lens, long entry_page_size, float scale, const float* sinks, T* out, long tokens,       \
        long heads, long dim) {                                                                                      \
        const Attention<T, E> call{q,                                                                                \
                                   positions,                                                                        \
                                   {keys, slot, dim, factors, 1},                                                    \
                                   {page_table, page_map, page_size},                                                \
                                   pages_per_row,                                                                    \
                                   rows,                                                                             \
                                   q_start,                                                                          \
                                   num_seqs,                                                                         \
                                   window,                                                                           \
                                   {entries, entry_slot, dim, entry_factors, 1},                                     \
                                   {entry_table, nullptr, entry_page_size},                                          \
                                   entry_pages_per_row,                                                              \
                                   entry_rows,                                                                       \
                                   entry_lens,                                                                       \
                                   scale,                                                                            \
                                   sinks,                                                                            \
                                   out,                                                                              \
                                   heads,                                                                            \
                                   dim};                                                                             \
        pool->op([=](Pool& p) { attend(p, call, tokens); });                                                         \
    }

FOREBAY_COMPRESSED_ATTENTION(float, float, f32_f32)
FOREBAY_COMPRESSED_ATTENTION(float, bf16, f32_bf16)
FOREBAY_COMPRESSED_ATTENTION(float, int8_t, f32_i8)
FOREBAY_COMPRESSED_ATTENTION(bf16, bf16, bf16_bf16)
FOREBAY_COMPRESSED_ATTENTION(bf16, int8_t, bf16_i8)

// Routing: each token's experts and what they count.
#include <cmath>
#include <limits>

#include "activations.h"
#include "pool.h"
#include "rows.h"

namespace {

constexpr float kLowest = -std::numeric_limits<float>::infinity();

// In the order of `Scoring` of ops/reference/experts.py.
enum class Scoring { kSoftmax, kSigmoid, kSqrtSoftplus };

struct Gating {
    long experts;
    long choices;
    long groups;
    long best_groups;
    long summed;  // of a group's best experts: one or two
    Scoring scoring;
    bool normalize;
    float epsilon;
    float scale;
    float least_sum;
};

void softmax_row(const float* logits, float* scores, long n) {
    float top = kLowest;
    for (long i = 0; i < n; ++i) top = std::max(top, logits[i]);
    Vec sums = zero();
    for_each_vector(n, [&](long i, long part) {
        const Vec e = exp(load_part(logits + i, part) - set1(top));
        store_part(scores + i, e, part);
        sums = sums + load_part(scores + i, part);  // lanes beyond the row are zero
    });
    const Vec sum = set1(hsum(sums));
    for_each_vector(n, [&](long i, long part) { store_part(scores + i, load_part(scores + i, part) / sum, part); });
}

void sigmoid_row(const float* logits, float* scores, long n) {
    for_each_vector(n, [&](long i, long part) { store_part(scores + i, sigmoid(load_part(logits + i, part)), part); });
}

// Softplus of more than 20 is its argument, as in torch.
void sqrt_softplus_row(const float* logits, float* scores, long n) {
    for (long i = 0; i < n; ++i) {
        scores[i] = std::sqrt(logits[i] > 20.0f ? logits[i] : std::log1p(std::exp(logits[i])));
    }
}

void score_row(Scoring scoring, const float* logits, float* scores, long n) {
    switch (scoring) {
        case Scoring::kSoftmax:
            return softmax_row(logits, scores, n);
        case Scoring::kSigmoid:
            return sigmoid_row(logits, scores, n);
        case Scoring::kSqrtSoftplus:
            return sqrt_softplus_row(logits, scores, n);
    }
}

// The places of the `count` best of n, the best first; of equal ones the first.
void best_of(const float* values, long n, long count, int64_t* places) {
    for (long i = 0, found = 0; i < n; ++i) {
        if (found == count && !(values[i] > values[places[count - 1]])) continue;
        long at = found < count ? found++ : count - 1;
        for (; at > 0 && values[i] > values[places[at - 1]]; --at) places[at] = places[at - 1];
        places[at] = i;
    }
}

// What a group counts: its best, or the sum of its two best.
float group_score(const float* values, long n, long summed) {
    float best = kLowest, second = kLowest;
    for (long i = 0; i < n; ++i) {
        if (values[i] > best) {
            second = best;
            best = values[i];
        } else if (values[i] > second) {
            second = values[i];
        }
    }
    return summed == 1 ? best : best + second;
}

// values become minus infinity outside of the best groups; `spare` [2 groups] int64.
void keep_best_groups(const Gating& gating, float* values, int64_t* spare) {
    const long size = gating.experts / gating.groups;
    float* scores = reinterpret_cast<float*>(spare + gating.groups);
    for (long g = 0; g < gating.groups; ++g) scores[g] = group_score(values + g * size, size, gating.summed);
    best_of(scores, gating.groups, gating.best_groups, spare);
    for (long g = 0; g < gating.groups; ++g) {
        if (std::find(spare, spare + gating.best_groups, g) != spare + gating.best_groups) continue;
        std::fill_n(values + g * size, size, kLowest);
    }
}

void weigh(const Gating& gating, const float* scores, const int64_t* ids, float* weights) {
    float sum = 0;
    for (long j = 0; j < gating.choices; ++j) sum += scores[ids[j]];
    sum = std::max(sum, gating.least_sum) + gating.epsilon;  // NaN where any score is
    for (long j = 0; j < gating.choices; ++j) {
        weights[j] = (gating.normalize ? scores[ids[j]] / sum : scores[ids[j]]) * gating.scale;
    }
}

void gate_row(const Gating& gating, const float* logits, const float* correction, const float* factors, int64_t* ids,
              float* weights) {
    const long n = gating.experts;
    auto* spare = static_cast<int64_t*>(thread_scratch(2 * gating.groups * sizeof(int64_t) + 2 * n * sizeof(float)));
    float* scores = reinterpret_cast<float*>(spare + 2 * gating.groups);
    float* chosen_by = scores + n;
    score_row(gating.scoring, logits, scores, n);
    for (long i = 0; i < n; ++i) {
        const float value = correction == nullptr ? scores[i] : scores[i] + correction[i];
        chosen_by[i] = std::isnan(value) ? kLowest : value;
    }
    if (gating.groups > 1) keep_best_groups(gating, chosen_by, spare);
    best_of(chosen_by, n, gating.choices, ids);
    weigh(gating, scores, ids, weights);
    if (factors == nullptr) return;
    for (long j = 0; j < gating.choices; ++j) weights[j] *= factors[ids[j]];
}

// The share of expert `chosen` in the softmax over those whose logits are no more than `limit` below its own, relative to
// the greater of its logit and their size; `without` is left out.
float share_of_near(const float* logits, long n, int64_t chosen, int64_t without, float limit) {
    const float top = logits[chosen];
    float sum = 0;
    for (long i = 0; i < n; ++i) {
        const float size = std::fabs(logits[i]);
        const bool far = (top - logits[i]) / (top > size ? top : size) > limit;
        if (i != without && !far) sum += std::exp(logits[i] - top);
    }
    return 1.0f / sum;
}

void sparse_mixer_row(const float* logits, long n, int64_t* ids, float* weights, float limit) {
    float* values = static_cast<float*>(thread_scratch(n * sizeof(float)));
    for (long i = 0; i < n; ++i) values[i] = std::isnan(logits[i]) ? kLowest : logits[i];
    best_of(values, n, 2, ids);
    weights[0] = share_of_near(logits, n, ids[0], -1, limit);
    weights[1] = share_of_near(logits, n, ids[1], ids[0], limit);
}

}  // namespace

// logits [rows, experts] -> ids and weights [rows, 2].
extern "C" void fb_sparse_mixer(Pool* pool, const float* logits, int64_t* ids, float* weights, long rows, long experts,
                                float limit) {
    pool->op([=](Pool& p) {
        p.run(rows, grain_for(8 * experts), [=](long begin, long end) {
            for (long r = begin; r < end; ++r) {
                sparse_mixer_row(logits + r * experts, experts, ids + 2 * r, weights + 2 * r, limit);
            }
        });
    });
}

// logits [rows, experts], correction and factors [experts] or null -> ids and weights [rows, choices].
extern "C" void fb_topk_gating(Pool* pool, const float* logits, const float* correction, const float* factors,
                               int64_t* ids, float* weights, long rows, long experts, long choices, long groups,
                               long best_groups, long summed, long scoring, long normalize, float epsilon,
                               float scale, float least_sum) {
    const Gating gating{experts, choices,        groups,  best_groups, summed, static_cast<Scoring>(scoring),
                        normalize != 0, epsilon, scale, least_sum};
    pool->op([=](Pool& p) {
        p.run(rows, grain_for(8 * experts), [=](long begin, long end) {
            for (long r = begin; r < end; ++r) {
                gate_row(gating, logits + r * experts, correction, factors, ids + r * choices, weights + r * choices);
            }
        });
    });
}

// logits [rows, experts], token_ids [rows], table [tokens, choices] -> ids and weights [rows, choices].
extern "C" void fb_hash_gating(Pool* pool, const float* logits, const int64_t* token_ids, const int64_t* table,
                               int64_t* ids, float* weights, long rows, long experts, long choices, long scoring,
                               long normalize, float epsilon, float scale, float least_sum) {
    const Gating gating{experts,        choices, 1, 1, 1, static_cast<Scoring>(scoring),
                        normalize != 0, epsilon, scale, least_sum};
    pool->op([=](Pool& p) {
        p.run(rows, grain_for(8 * experts), [=](long begin, long end) {
            auto* scores = static_cast<float*>(thread_scratch(experts * sizeof(float)));
            for (long r = begin; r < end; ++r) {
                std::copy_n(table + token_ids[r] * choices, choices, ids + r * choices);
                score_row(gating.scoring, logits + r * experts, scores, experts);
                weigh(gating, scores, ids + r * choices, weights + r * choices);
            }
        });
    });
}

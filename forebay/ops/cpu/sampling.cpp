// Drawing a token from each row of logits by itself: softmax, top-k, top-p, min-p, and the running sum's inversion.
#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>

#include "pool.h"
#include "simd.h"

namespace {

// Weights are exp((x - max) / temperature), of 0..1. Positive floats order as their bits do, so the upper bits of a
// weight are its place in a histogram that is sorted already.
constexpr int kLowBits = 17;
constexpr uint32_t kLastBin = 0x3f800000u >> kLowBits;  // that of 1.0f
constexpr long kBlock = 512;                            // entries of the running sum that are added up at once
constexpr long kGroups = 2048;
constexpr long kFirstLook = 512;  // so many of the likeliest hold the nucleus of most distributions

using Pair __attribute__((vector_size(16), may_alias)) = double;

struct alignas(16) Bin {
    double weight, count;
};

struct Scratch {
    float* weights;  // [n]
    float* members;  // [n]
    float* maxima;   // [kGroups]
    Bin* bins;       // [kLastBin + 1]

    explicit Scratch(long n) {
        const long floats = (n + 15) / 16 * 16;
        const long bytes = (kLastBin + 1) * sizeof(Bin) + (2 * floats + kGroups) * sizeof(float);
        bins = static_cast<Bin*>(thread_scratch(bytes));
        weights = reinterpret_cast<float*>(bins + kLastBin + 1);
        members = weights + floats;
        maxima = members + floats;
    }
};

// The largest of a row, or NaN if the row holds a NaN, or +inf, or nothing but -inf.
float finite_max(const float* x, long n) {
    Vec top = set1(-std::numeric_limits<float>::infinity());
    float last = -std::numeric_limits<float>::infinity();
    bool nan = false;
    const long whole = n / W * W;
    for (long i = 0; i < whole; i += W) {
        const Vec v = load(x + i);
        top = max(v, top);
        nan |= nan_lanes(v) != 0;
    }
    for (long i = whole; i < n; ++i) {
        last = std::max(last, x[i]);
        nan |= std::isnan(x[i]);
    }
    last = std::max(last, hmax(top));
    return nan || std::isinf(last) ? std::numeric_limits<float>::quiet_NaN() : last;
}

void weigh(const float* x, long n, float top, float temperature, float* weights) {
    // A temperature may be 0 once it is a float: whatever is below the maximum then weighs nothing.
    const Vec scale = set1(std::max(temperature, std::numeric_limits<float>::min())), highest = set1(top);
    for_each_vector(n, [&](long i, long part) {
        store_part(weights + i, exp((load_part(x + i, part) - highest) / scale), part);
    });
}

// Where a descending sum reached its target, and what it was there with all ties; not `met` if it did not.
struct Cut {
    float least;
    double weight;
    bool met;
};

// Finds the largest t such that the weights w >= t measure at least a target together. It looks at a few of the largest
// first, and only where those do not suffice at all of them: a histogram costs several times as much.
class Ranking {
  public:
    Ranking(const Scratch& s, long n, long num_wanted) : s_(s), n_(n) {
        if (num_wanted >= std::min(n, kGroups)) return;
        gather(group_floor(num_wanted));
    }

    // Of the weights below `floor` nothing is known; `floor` is the answer if those above do not reach the target.
    Cut cut(float floor, double target, bool by_count) {
        target = std::max(target, std::numeric_limits<double>::min());
        const Cut found = walk({floor, 0, false}, 0, target, by_count);
        // They may be all there are above the floor that top-k left: rounding alone then missed the target.
        const bool complete = num_members_ > 0 && s_.members[num_members_ - 1] <= floor;
        return found.met || complete ? found : cut_by_bins(floor, target, by_count);
    }

  private:
    // A value that at least `num` of the weights reach: as many groups have such a largest member.
    float group_floor(long num) {
        std::fill_n(s_.maxima, kGroups, 0.0f);
        long i = 0;
        for (; i + kGroups <= n_; i += kGroups) {
            for (long j = 0; j < kGroups; j += W) {
                store(s_.maxima + j, max(load(s_.maxima + j), load(s_.weights + i + j)));
            }
        }
        for (long j = 0; i + j < n_; ++j) s_.maxima[j] = std::max(s_.maxima[j], s_.weights[i + j]);
        std::nth_element(s_.maxima, s_.maxima + num - 1, s_.maxima + kGroups, std::greater<>());
        return s_.maxima[num - 1];
    }

    void gather(float floor) {
        const Vec bound = set1(floor);
        const long whole = n_ / W * W;
        for (long i = 0; i < whole; i += W) {
            for (unsigned lanes = at_least_lanes(load(s_.weights + i), bound); lanes != 0; lanes &= lanes - 1) {
                s_.members[num_members_++] = s_.weights[i + __builtin_ctz(lanes)];
            }
        }
        for (long i = whole; i < n_; ++i) {
            if (s_.weights[i] >= floor) s_.members[num_members_++] = s_.weights[i];
        }
        std::sort(s_.members, s_.members + num_members_, std::greater<>());
    }

    // Goes down the members from where `above` was measured and `start.weight` weighed.
    Cut walk(Cut start, double above, double target, bool by_count) const {
        Cut cut = start;
        for (const float* m = s_.members; m != s_.members + num_members_ && *m >= start.least; ++m) {
            if (cut.met && *m != cut.least) return cut;
            cut.least = *m;
            cut.weight += *m;
            above += by_count ? 1.0 : *m;
            cut.met |= above >= target;
        }
        return cut;
    }

    Cut cut_by_bins(float floor, double target, bool by_count) {
        if (!filled_) fill_bins();
        double above = 0, weight = 0;
        for (long b = kLastBin; b >= 0; --b) {
            const Bin bin = s_.bins[b];
            const double measure = by_count ? bin.count : bin.weight;
            if (above + measure >= target) {
                const auto inside = [=](float w) { return bin_of(w) == static_cast<uint32_t>(b) && w >= floor; };
                num_members_ = std::copy_if(s_.weights, s_.weights + n_, s_.members, inside) - s_.members;
                std::sort(s_.members, s_.members + num_members_, std::greater<>());
                const Cut cut = walk({floor, weight, false}, above, target, by_count);
                num_members_ = 0;
                return cut;
            }
            above += measure;
            weight += bin.weight;
        }
        return {floor, weight, false};
    }

    void fill_bins() {
        filled_ = true;
        std::fill_n(s_.bins, kLastBin + 1, Bin{0, 0});
        for (long i = 0; i < n_; ++i) {
            double* bin = &s_.bins[bin_of(s_.weights[i])].weight;
            *reinterpret_cast<Pair*>(bin) += Pair{s_.weights[i], 1.0};
        }
    }

    static uint32_t bin_of(float weight) { return std::bit_cast<uint32_t>(weight) >> kLowBits; }

    const Scratch& s_;
    long n_;
    long num_members_ = 0;  // the largest weights, in descending order, all ties included
    bool filled_ = false;
};

double block_sum(const float* weights, long n, float least) {
    constexpr int kChains = 8;
    double sums[kChains] = {};
    long i = 0;
    for (; i + kChains <= n; i += kChains) {
        for (int j = 0; j < kChains; ++j) sums[j] += weights[i + j] >= least ? weights[i + j] : 0.0f;
    }
    for (; i < n; ++i) sums[0] += weights[i] >= least ? weights[i] : 0.0f;
    return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

double sum_kept(const float* weights, long n, float least) {
    double total = 0;
    for (long at = 0; at < n; at += kBlock) total += block_sum(weights + at, std::min(kBlock, n - at), least);
    return total;
}

// The least weight that top-k, then top-p of what is left, then min-p keep.
float least_kept(const Scratch& s, long n, int64_t top_k, float top_p, float min_p) {
    float least = 0;
    const bool some = top_k > 0 && top_k < n;
    if (some || top_p < 1) {
        Ranking ranking(s, n, some ? top_k : kFirstLook);
        double weight = 0;
        if (some) {
            const Cut cut = ranking.cut(0, static_cast<double>(top_k), true);
            least = cut.least;
            weight = cut.weight;
        } else {
            weight = sum_kept(s.weights, n, 0);
        }
        if (top_p < 1) least = ranking.cut(least, static_cast<double>(top_p) * weight, false).least;
    }
    return std::max(least, min_p);  // the largest weight is 1
}

// The entry at which the running sum of the weights >= least first exceeds `uniform` times their total.
long invert(const float* weights, long n, float least, double uniform) {
    const double total = sum_kept(weights, n, least);
    const double aim = std::min(uniform * total, std::nextafter(total, 0.0));
    double sum = 0;
    long at = 0;
    for (; at < n; at += kBlock) {
        const double next = sum + block_sum(weights + at, std::min(kBlock, n - at), least);
        if (next > aim) break;
        sum = next;
    }
    // The block's own running sum is rounded in another order: its last entry that is kept is the end in any case.
    long chosen = at;
    for (long i = at; i < std::min(n, at + kBlock); ++i) {
        if (weights[i] < least || weights[i] == 0) continue;
        chosen = i;
        sum += weights[i];
        if (sum > aim) break;
    }
    return chosen;
}

}  // namespace

// logits [rows, n], uniform, temperature, top_k, top_p, min_p [rows] -> ids [rows]; top_k, top_p, min_p may be null.
extern "C" void fb_sample_rows(Pool* pool, const float* logits, const double* uniform, const float* temperature,
                               const int64_t* top_k, const float* top_p, const float* min_p, int64_t* ids, long rows,
                               long n) {
    pool->op([=](Pool& p) {
        p.run(rows, 1, [=](long begin, long end) {
            const Scratch scratch(n);
            for (long r = begin; r < end; ++r) {
                const float* row = logits + r * n;
                const float top = finite_max(row, n);
                ids[r] = 0;
                if (std::isnan(top)) continue;
                weigh(row, n, top, temperature[r], scratch.weights);
                const float least =
                    least_kept(scratch, n, top_k ? top_k[r] : 0, top_p ? top_p[r] : 1.0f, min_p ? min_p[r] : 0.0f);
                ids[r] = invert(scratch.weights, n, least, uniform[r]);
            }
        });
    });
}

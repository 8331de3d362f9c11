#include "rounded.h"

#include "ints.h"

namespace {

template <int PLANES, class T>
void round_group(const T* x, RoundedGroup<PLANES>& out) {
    constexpr int kVecs = kGroup / W;
    constexpr float kLargest = PLANES == 1 ? 127 : 127 * 256 + 127;
    constexpr float kTiny = 1e-30f;  // kLargest over less may overflow; such a group is zero
    Vec v[kVecs], most = zero(), poison = zero(), halves[2] = {zero(), zero()};
    unrolled<kVecs>([&](auto i) FOREBAY_INLINE_LAMBDA {
        v[i] = load(x + i * W);
        most = max(most, max(v[i], zero() - v[i]));
        poison = fma(v[i], zero(), poison);
    });
    const float largest = hmax(most);
    const Vec inverse = set1(largest > kTiny ? kLargest / largest : 0.0f);
    unrolled<kVecs>([&](auto i) FOREBAY_INLINE_LAMBDA {
        const Vec whole = round(v[i] * inverse);
        halves[i * W / 16] = halves[i * W / 16] + whole;
        const Ints n = to_ints(whole);
        if constexpr (PLANES == 1) {
            store_bytes(out.planes[0] + i * W, n);
        } else {
            store_bytes(out.planes[0] + i * W, shift_right_signed<8>(n + set1_int(128)));
            store_bytes(out.planes[1] + i * W, n);
        }
    });
    const Quad added = hsum4(halves[0], halves[1], poison, poison);
    out.scale = largest / kLargest + added[2];
    const float sums[3] = {added[0], added[1], added[0] + added[1]};
    for (int i = 0; i < 3; ++i) {
        out.sums[i] = out.scale * sums[i];
        out.minus_sums[i] = static_cast<int32_t>(-sums[i]);
    }
}

template <int PLANES, class T>
void round_blocks(const T* x, long ldx, long rows, long inputs, void* out) {
    auto* groups = static_cast<RoundedGroup<PLANES>*>(out);
    for (long first = 0; first < rows; first += kMostRows) {
        const long of_block = rows_of_block(rows - first), present = std::min(of_block, rows - first);
        for (long k = 0; k < inputs; k += kGroup, groups += of_block) {
            for (long r = 0; r < present; ++r) round_group<PLANES>(x + (first + r) * ldx + k, groups[r]);
        }
    }
}

}  // namespace

template <class T>
void round_rows(const T* x, long ldx, long rows, long inputs, long bits, void* out) {
    (bits == 8 ? round_blocks<1, T> : round_blocks<2, T>)(x, ldx, rows, inputs, out);
}

template void round_rows(const float*, long, long, long, long, void*);
template void round_rows(const bf16*, long, long, long, long, void*);

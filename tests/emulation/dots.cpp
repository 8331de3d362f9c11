// Sums of products of codes and bytes by Dots (ints.h) against loops: codes of every width, blocks of rows of every size,
// random numbers and the largest of either sign.
#include <cstdio>
#include <cstdlib>

#include "ints.h"

namespace {

long count = 0, wrong = 0;

enum class Fill { kRandom, kLargest, kLeast };

// W outputs by ROWS rows; x is [rows][fours][4], codes [fours][outputs][4].
template <int BITS, int ROWS>
void check(Fill fill) {
    using D = Dots<BITS, ROWS>;
    constexpr int kAll = 8;
    uint8_t codes[kAll][W][4];
    int8_t x[ROWS][kAll][4];
    for (auto& four : codes) {
        for (auto& output : four) {
            for (uint8_t& code : output) code = fill == Fill::kRandom ? std::rand() % (1 << BITS) : (1 << BITS) - 1;
        }
    }
    for (auto& row : x) {
        for (auto& four : row) {
            for (int8_t& n : four) n = fill == Fill::kRandom ? std::rand() % 256 - 128 : fill == Fill::kLeast ? -128 : 127;
        }
    }
    D dots[ROWS / D::kRows];
    for (D& d : dots) d.clear();
    unrolled<kAll / D::kFours>([&](auto i) {
        Ints c[D::kFours];
        for (int j = 0; j < D::kFours; ++j) c[j] = load_ints(codes[i * D::kFours + j]);
        for (int r = 0; r < ROWS; r += D::kRows) {
            dots[r / D::kRows].template add<i * D::kFours>(c, x[r][i * D::kFours], sizeof x[r]);
        }
    });
    for (int r = 0; r < ROWS; ++r) {
        int32_t sums[W];
        store_ints(sums, dots[r / D::kRows].total(r % D::kRows));
        for (int n = 0; n < W; ++n) {
            int32_t expected = 0;
            for (int k = 0; k < kAll * 4; ++k) expected += (codes[k / 4][n][k % 4] - D::kLowered) * x[r][k / 4][k % 4];
            ++count;
            if (sums[n] == expected) continue;
            ++wrong;
            std::printf("%d bits, row %d of %d, output %d: %d, not %d\n", BITS, r, ROWS, n, sums[n], expected);
        }
    }
}

template <int BITS>
void check_all() {
    for (Fill fill : {Fill::kRandom, Fill::kLargest, Fill::kLeast}) {
        check<BITS, 1>(fill);
        check<BITS, 2>(fill);
        check<BITS, 4>(fill);
    }
}

}  // namespace

int main() {
    check_all<2>();
    check_all<3>();
    check_all<4>();
    check_all<5>();
    check_all<6>();
    check_all<8>();
    if (wrong == 0) std::printf("%ld sums\n", count);
    return wrong != 0;
}

// What this machine gives at most, right now: how fast memory is read, and how many multiply-adds a second each
// instruction does on registers alone.
//
//     peaks THREADS BYTES NAME...   ->   a line `read BYTES/S`, and a line `NAME MULTIPLY-ADDS/S` for each name
//
// A rate is the best of some windows: a neighbour can only take from it.
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <barrier>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

using Clock = std::chrono::steady_clock;

constexpr int WINDOWS = 5;
constexpr double WINDOW_S = 0.03;
constexpr int ACCUMULATORS = 12;  // more than two pipes of five cycles need, fewer than AVX2's registers

// `work` does a round on thread t; returns the rounds a second of all threads together.
template <typename Work>
double rate(int num_threads, Work work) {
    std::vector<double> rounds(num_threads);
    double best = 0.0;
    for (int window = 0; window < WINDOWS; ++window) {
        std::barrier together(num_threads);
        std::vector<std::thread> threads;
        for (int t = 0; t < num_threads; ++t)
            threads.emplace_back([&, t] {
                together.arrive_and_wait();
                const auto started = Clock::now();
                double seconds = 0.0;
                long done = 0;
                for (; seconds < WINDOW_S; ++done, seconds = std::chrono::duration<double>(Clock::now() - started).count())
                    work(t);
                rounds[t] = done / seconds;
            });
        for (std::thread& thread : threads) thread.join();
        double sum = 0.0;
        for (double r : rounds) sum += r;
        best = std::max(best, sum);
    }
    return best;
}

__attribute__((target("avx2"))) void read(const char* from, const char* to) {
    __m256i sums[8] = {};
    for (; from < to; from += sizeof sums)
        for (int i = 0; i < 8; ++i)
            sums[i] = _mm256_xor_si256(sums[i], _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from) + i));
    for (__m256i& sum : sums) __asm__ volatile("" : : "x"(sum));
}

double read_rate(int num_threads, long num_bytes) {
    const long part = std::max(num_bytes / num_threads / 4096, 1L) * 4096;
    std::vector<char> memory(part * num_threads, 1);
    return part * rate(num_threads, [&](int t) { read(&memory[t * part], &memory[t * part] + part); });
}

constexpr long STEPS = 4096;

// A function that does STEPS x ACCUMULATORS of `step`, each on an accumulator of its own. The operands are hidden from
// the compiler, which would else take what they give out of the loop.
#define ROUND(name, isa, vector, step)                                    \
    __attribute__((target(isa))) void name(int) {                         \
        vector sums[ACCUMULATORS] = {}, a = {}, b = {};                   \
        for (long i = 0; i < STEPS; ++i)                                  \
            _Pragma("GCC unroll 16") for (int j = 0; j < ACCUMULATORS; ++j) { \
                vector& sum = sums[j];                                    \
                __asm__ volatile("" : "+v"(a), "+v"(b));                  \
                sum = step;                                               \
            }                                                             \
        for (vector & sum : sums) __asm__ volatile("" : : "v"(sum));      \
    }

ROUND(fma, "avx2,fma", __m256, _mm256_fmadd_ps(a, b, sum))
ROUND(bytes, "avx2", __m256i, _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(a, b), b)))
ROUND(vnni, "avxvnni", __m256i, _mm256_dpbusd_avx_epi32(sum, a, b))
ROUND(fma512, "avx512f", __m512, _mm512_fmadd_ps(a, b, sum))
ROUND(bytes512, "avx512bw", __m512i, _mm512_add_epi32(sum, _mm512_madd_epi16(_mm512_maddubs_epi16(a, b), b)))
ROUND(vnni512, "avx512vnni", __m512i, _mm512_dpbusd_epi32(sum, a, b))
ROUND(bf16, "avx512bf16", __m512, _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b)))

// Tiles of 16 rows of 64 bytes; whoever uses them must have asked the kernel first.
__attribute__((target("amx-tile"))) void load_tiles() {
    syscall(SYS_arch_prctl, 0x1023, 18);  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    alignas(64) unsigned char config[64] = {1};
    for (int tile = 0; tile < 8; ++tile) {
        config[16 + 2 * tile] = 64;
        config[48 + tile] = 16;
    }
    __asm__ volatile("" : : : "memory");  // gcc 12 does not know that the next one reads memory
    _tile_loadconfig(config);
}

#define TILES(name, isa, product)                             \
    __attribute__((target("amx-tile," isa))) void name(int) { \
        load_tiles();                                         \
        for (long i = 0; i < STEPS; ++i) {                    \
            product(0, 6, 7);                                 \
            product(1, 6, 7);                                 \
            product(2, 6, 7);                                 \
            product(3, 6, 7);                                 \
        }                                                     \
        _tile_release();                                      \
    }

TILES(amx_bf16, "amx-bf16", _tile_dpbf16ps)
TILES(amx_int8, "amx-int8", _tile_dpbusd)

struct Instruction {
    const char* name;
    void (*round)(int);
    double products;  // of one round
};

constexpr double ROUNDS = double(STEPS) * ACCUMULATORS;
const Instruction INSTRUCTIONS[] = {
    {"fma", fma, ROUNDS * 8},
    {"bytes", bytes, ROUNDS * 32},
    {"vnni", vnni, ROUNDS * 32},
    {"fma512", fma512, ROUNDS * 16},
    {"bytes512", bytes512, ROUNDS * 64},
    {"vnni512", vnni512, ROUNDS * 64},
    {"bf16", bf16, ROUNDS * 32},
    {"amx_bf16", amx_bf16, STEPS * 4.0 * 16 * 16 * 32},
    {"amx_int8", amx_int8, STEPS * 4.0 * 16 * 16 * 64},
};

int main(int argc, char** argv) {
    const int num_threads = argc > 2 ? std::atoi(argv[1]) : 0;
    if (num_threads < 1) return 2;
    std::printf("read %.0f\n", read_rate(num_threads, std::atol(argv[2])));
    for (int i = 3; i < argc; ++i)
        for (const Instruction& instruction : INSTRUCTIONS)
            if (!std::strcmp(instruction.name, argv[i]))
                std::printf("%s %.0f\n", argv[i], instruction.products * rate(num_threads, instruction.round));
}

// Ranks exchange parts of tensors through memory that their processes share.
//
// Exchange n uses buffer n % 2 of two: each rank writes its part, all ranks meet at a barrier, and each reads. A rank
// writes buffer n % 2 again in exchange n + 2, behind the barrier of n + 1, which no rank reaches before it has read
// exchange n. So one barrier per exchange is enough.
#include <linux/futex.h>
#include <poll.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <vector>

#include "pool.h"

namespace {

constexpr long kLine = 64;              // bytes: no two ranks write the same cache line
constexpr int kSpins = 4000;            // some 50 us: longer than a part takes that is on its way
constexpr long kSleepNs = 20'000'000;  // between two looks at whether the other ranks live

struct alignas(kLine) Line {
    std::atomic<uint32_t> value;
};

// The memory: these lines, one more for each rank, and the buffers of `size` parts. It begins as zeros.
struct Shared {
    Line bell;       // arrivals of all ranks: what a rank sleeps on
    Line sleepers;
    Line lost;       // not 0: a rank has ended
    Line arrived[];  // by rank: exchanges that it has written
};

struct Exchange {
    Shared* shared;
    int rank, size, buffers;
    long part_bytes;
    std::vector<int> processes;  // pidfds of other ranks, readable once the process has ended
    uint32_t count = 0;          // exchanges so far

    char* part(int of) const {
        char* memory = reinterpret_cast<char*>(shared->arrived + size);
        return memory + ((count % buffers) * size + of) * part_bytes;
    }

    bool lost() const { return shared->lost.value.load(std::memory_order_relaxed) != 0; }

    bool complete() const {
        for (int of = 0; of < size; ++of) {
            uint32_t there = shared->arrived[of].value.load(std::memory_order_acquire);
            if (static_cast<int32_t>(there - (count + 1)) < 0) return false;
        }
        return true;
    }

    void wake() {
        shared->bell.value.fetch_add(1);
        if (shared->sleepers.value.load() > 0) syscall(SYS_futex, &shared->bell.value, FUTEX_WAKE, size, 0, 0, 0);
    }

    void look_for_the_dead() {
        for (int process : processes) {
            pollfd ended{process, POLLIN, 0};
            if (poll(&ended, 1, 0) > 0) shared->lost.value.store(1);
        }
        if (lost()) wake();
    }

    // Spins, then sleeps, until all ranks have written. False if one has ended.
    bool meet() {
        shared->arrived[rank].value.store(count + 1, std::memory_order_release);
        wake();
        for (int spin = 0; spin < kSpins && !complete() && !lost(); ++spin) {
#if defined(__x86_64__)
            __builtin_ia32_pause();
#endif
        }
        while (!complete()) {
            if (lost()) return false;
            shared->sleepers.value.fetch_add(1);
            uint32_t heard = shared->bell.value.load();
            timespec most{0, kSleepNs};
            if (!complete()) syscall(SYS_futex, &shared->bell.value, FUTEX_WAIT, heard, &most, 0, 0);
            shared->sleepers.value.fetch_sub(1);
            if (!complete()) look_for_the_dead();
        }
        return true;
    }

    // One exchange: `write` fills this rank's part, `read` gets those of all.
    template <class Write, class Read>
    void run(const Write& write, const Read& read) {
        if (lost()) return;
        write(part(rank));
        if (meet()) read();
        ++count;
    }
};

}  // namespace

extern "C" {

Exchange* fb_exchange_create(char* shared, long rank, long size, long buffers, long part_bytes, const int* processes,
                             long count) {
    return new Exchange{reinterpret_cast<Shared*>(shared), static_cast<int>(rank), static_cast<int>(size),
                        static_cast<int>(buffers), part_bytes, std::vector<int>(processes, processes + count)};
}

void fb_exchange_destroy(Exchange* exchange) { delete exchange; }

// Bytes of the memory that `size` ranks share.
long fb_exchange_bytes(long size, long buffers, long part_bytes) {
    return static_cast<long>(sizeof(Shared) + size * sizeof(Line)) + buffers * size * part_bytes;
}

long fb_exchange_lost(const Exchange* exchange) { return exchange->lost(); }

// Ends the waits of all ranks, now and later.
void fb_exchange_end(Exchange* exchange) {
    exchange->shared->lost.value.store(1);
    exchange->wake();
}

// A row of `out` has `units` of `unit` bytes, cut at `out_width` bytes; rank r has those from r * units / size on. `in`
// are rows of this rank's, `ld` bytes apart. Ranks but `reader` get zeros, none if it is -1.
void fb_exchange_gather(Pool* pool, Exchange* exchange, const char* in, long ld, long unit, long units, char* out,
                        long out_width, long rows, long reader) {
    pool->op([=](Pool&) {
        const long size = exchange->size;
        const auto first_of = [=](long rank) { return rank * units / size * unit; };
        const long width = first_of(exchange->rank + 1) - first_of(exchange->rank);
        const bool reads = reader < 0 || reader == exchange->rank;
        if (!reads) std::memset(out, 0, rows * out_width);
        const long widest = (units + size - 1) / size * unit;  // of all ranks: they take the same runs of rows
        const long most = std::max(1L, exchange->part_bytes / std::max(1L, widest));
        for (long first = 0; first < rows; first += most) {
            const long end = std::min(rows, first + most);
            exchange->run(
                [=](char* part) {
                    for (long r = first; r < end; ++r) std::memcpy(part + (r - first) * width, in + r * ld, width);
                },
                [=] {
                    for (int of = 0; reads && of < size && first_of(of) < out_width; ++of) {
                        const char* part = exchange->part(of);
                        const long begin = first_of(of), whole = first_of(of + 1) - begin;
                        const long own = std::min(whole, out_width - begin);
                        for (long r = first; r < end; ++r)
                            std::memcpy(out + r * out_width + begin, part + (r - first) * whole, own);
                    }
                });
        }
    });
}

// Row r of `out` [rows, width bytes] is that of the rank ids[r] / per_rank.
void fb_exchange_rows(Pool* pool, Exchange* exchange, const char* in, const int64_t* ids, long per_rank, char* out,
                      long width, long rows) {
    pool->op([=](Pool&) {
        const long most = std::max(1L, exchange->part_bytes / std::max(1L, width));
        for (long first = 0; first < rows; first += most) {
            const long end = std::min(rows, first + most);
            exchange->run(
                [=](char* part) {
                    for (long r = first; r < end; ++r)
                        if (ids[r] / per_rank == exchange->rank)
                            std::memcpy(part + (r - first) * width, in + r * width, width);
                },
                [=] {
                    for (long r = first; r < end; ++r)
                        std::memcpy(out + r * width, exchange->part(ids[r] / per_rank) + (r - first) * width, width);
                });
        }
    });
}

// ids[i] % per_rank: where the rank that has a row has it.
void fb_exchange_places(Pool* pool, const int64_t* ids, int64_t* out, long per_rank, long count) {
    pool->op([=](Pool&) {
        for (long i = 0; i < count; ++i) out[i] = ids[i] % per_rank;
    });
}

// The bytes at `at` become those of the rank `source`.
void fb_exchange_spread(Pool* pool, Exchange* exchange, char* at, long bytes, long source) {
    pool->op([=](Pool&) {
        for (long first = 0; first < bytes; first += exchange->part_bytes) {
            const long count = std::min(exchange->part_bytes, bytes - first);
            exchange->run(
                [=](char* part) {
                    if (exchange->rank == source) std::memcpy(part, at + first, count);
                },
                [=] {
                    if (exchange->rank != source) std::memcpy(at + first, exchange->part(source), count);
                });
        }
    });
}
}

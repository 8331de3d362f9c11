#include "pool.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <thread>

namespace {

// Longer than the interpreter needs from one op to the next, so that workers stay awake within a step, and short enough
// that an idle engine gives its cores back at once.
constexpr auto kSpin = std::chrono::microseconds(60);

// Leaves the core to its other thread, if it has one, for a moment.
void pause_core() {
#if defined(__aarch64__)
    asm volatile("yield");
#else
    __builtin_ia32_pause();
#endif
}

}  // namespace

struct Pool::Workers {
    explicit Workers(int count) {
        for (int i = 0; i < count; ++i) threads.emplace_back([this] { work(); });
    }

    ~Workers() {
        stopping = true;
        ticket += 2;
        ticket.notify_all();
        for (auto& thread : threads) thread.join();
    }

    void take_pieces() {
        for (;;) {
            const long begin = next.fetch_add(grain);
            if (begin >= count) return;
            call(body, begin, std::min(begin + grain, count));
        }
    }

    void work() {
        uint32_t seen = ticket;
        while (!stopping) {
            seen = wait_for_change(seen);
            if (seen % 2 == 0) continue;
            ++inside;
            if (ticket == seen) take_pieces();
            --inside;
        }
    }

    uint32_t wait_for_change(uint32_t seen) {
        const auto deadline = std::chrono::steady_clock::now() + kSpin;
        do {
            for (int i = 0; i < 16; ++i) {
                const uint32_t now = ticket;
                if (now != seen) return now;
                pause_core();
            }
        } while (std::chrono::steady_clock::now() < deadline);
        ticket.wait(seen);
        return ticket;
    }

    std::atomic<bool> stopping{false};
    // Odd while a job is open. A worker first counts itself in, then looks whether the job is still open; the caller
    // first closes the job, then looks who is in: so none of them can start on a job that has returned.
    alignas(64) std::atomic<uint32_t> ticket{0};
    alignas(64) std::atomic<int> inside{0};
    alignas(64) std::atomic<long> next{0};
    long count = 0;
    long grain = 0;
    const void* body = nullptr;
    Call call = nullptr;
    std::vector<std::thread> threads;  // last: they use all of the above
};

Pool::Pool(int num_threads) : num_threads_(num_threads), workers_(new Workers(num_threads - 1)) {}

Pool::~Pool() { delete workers_; }

void Pool::run_shared(long count, long grain, const void* body, Call call) {
    Workers& w = *workers_;
    w.count = count;
    w.grain = grain;
    w.body = body;
    w.call = call;
    w.next = 0;
    ++w.ticket;
    w.ticket.notify_all();
    w.take_pieces();
    ++w.ticket;
    // A worker inside may have lost its core to another process: give it ours rather than spin against it.
    for (int spins = 0; w.inside != 0; ++spins) {
        if (spins < 1000) {
            pause_core();
        } else {
            std::this_thread::yield();
        }
    }
}

Recording*& recording() {
    thread_local Recording* current = nullptr;
    return current;
}

void* thread_scratch(long bytes) {
    struct Free {
        void operator()(void* p) const { std::free(p); }
    };
    thread_local std::unique_ptr<void, Free> memory;
    thread_local long size = 0;
    if (size < bytes) {
        size = (bytes + 4095) / 4096 * 4096;
        memory.reset(std::aligned_alloc(64, size));
        if (!memory) throw std::bad_alloc();
    }
    return memory.get();
}

extern "C" {

Pool* fb_pool_create(int num_threads) { return new Pool(num_threads); }

void fb_pool_destroy(Pool* pool) { delete pool; }

Recording* fb_recording_create() { return new Recording; }

void fb_recording_destroy(Recording* ops) { delete ops; }

void fb_recording_record(Recording* ops) { recording() = ops; }

long fb_recording_length(const Recording* ops) { return static_cast<long>(ops->size()); }

// A replayed step is this one call.
void fb_recording_replay(const Recording* ops) {
    for (const auto& op : *ops) op();
}
}

#include "pool.h"

#include <immintrin.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <new>

namespace {

// Longer than the interpreter needs from one op to the next, so that workers stay awake within a step, and short enough
// that an idle engine gives its cores back at once.
constexpr auto kSpin = std::chrono::microseconds(60);

}  // namespace

Pool::Pool(int num_threads) {
    for (int i = 1; i < num_threads; ++i) workers_.emplace_back([this] { work(); });
}

Pool::~Pool() {
    stopping_ = true;
    ticket_ += 2;
    ticket_.notify_all();
    for (auto& worker : workers_) worker.join();
}

void Pool::run_shared(long count, long grain, const void* body, Call call) {
    count_ = count;
    grain_ = grain;
    body_ = body;
    call_ = call;
    next_ = 0;
    ++ticket_;
    ticket_.notify_all();
    take_pieces();
    ++ticket_;
    // A worker inside may have lost its core to another process: give it ours rather than spin against it.
    for (int spins = 0; inside_ != 0; ++spins) {
        if (spins < 1000) {
            _mm_pause();
        } else {
            std::this_thread::yield();
        }
    }
}

void Pool::take_pieces() {
    for (;;) {
        const long begin = next_.fetch_add(grain_);
        if (begin >= count_) return;
        call_(body_, begin, std::min(begin + grain_, count_));
    }
}

void Pool::work() {
    uint32_t seen = ticket_;
    while (!stopping_) {
        seen = wait_for_change(seen);
        if (seen % 2 == 0) continue;
        ++inside_;
        if (ticket_ == seen) take_pieces();
        --inside_;
    }
}

uint32_t Pool::wait_for_change(uint32_t seen) {
    const auto deadline = std::chrono::steady_clock::now() + kSpin;
    do {
        for (int i = 0; i < 16; ++i) {
            const uint32_t now = ticket_;
            if (now != seen) return now;
            _mm_pause();
        }
    } while (std::chrono::steady_clock::now() < deadline);
    ticket_.wait(seen);
    return ticket_;
}

Tape*& recording() {
    thread_local Tape* tape = nullptr;
    return tape;
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

Tape* fb_tape_create() { return new Tape; }

void fb_tape_destroy(Tape* tape) { delete tape; }

void fb_tape_record(Tape* tape) { recording() = tape; }

long fb_tape_length(const Tape* tape) { return static_cast<long>(tape->size()); }

// A replayed step is this one call.
void fb_tape_replay(const Tape* tape) {
    for (const auto& op : *tape) op();
}
}

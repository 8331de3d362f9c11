// A small thread pool for kernels of a few microseconds to milliseconds.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

// What a fixed-shape step did, op by op, to be done again on the same addresses.
using Tape = std::vector<std::function<void()>>;

// Where this thread's ops go besides being done, whatever pool runs them; null for nowhere.
Tape*& recording();

class Pool {
  public:
    explicit Pool(int num_threads);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int num_threads() const { return static_cast<int>(workers_.size()) + 1; }

    // Calls body(begin, end) over 0..count in pieces of `grain`, on the caller and on any worker that comes in time.
    // Which thread takes a piece is not fixed, so a piece's result must not depend on it. Returns when all are done.
    template <class Body>
    void run(long count, long grain, const Body& body) {
        if (workers_.empty() || count <= grain) {
            if (count > 0) body(0L, count);
            return;
        }
        run_shared(count, grain, &body,
                   [](const void* b, long begin, long end) { (*static_cast<const Body*>(b))(begin, end); });
    }

    // Does an op, which holds its arguments by value; while a tape is being recorded, puts it there instead.
    template <class Op>
    void op(const Op& op) {
        if (recording() != nullptr) {
            recording()->push_back([this, op] { op(*this); });
        } else {
            op(*this);
        }
    }

    // As run, in about eight pieces per thread.
    template <class Body>
    void run(long count, const Body& body) {
        const long pieces = 8L * num_threads();
        run(count, (count + pieces - 1) / pieces, body);
    }

  private:
    using Call = void (*)(const void* body, long begin, long end);

    void run_shared(long count, long grain, const void* body, Call call);
    void take_pieces();
    void work();
    uint32_t wait_for_change(uint32_t seen);

    std::vector<std::thread> workers_;
    std::atomic<bool> stopping_{false};
    // Odd while a job is open. A worker first counts itself in, then looks whether the job is still open; the caller
    // first closes the job, then looks who is in: so none of them can start on a job that has returned.
    alignas(64) std::atomic<uint32_t> ticket_{0};
    alignas(64) std::atomic<int> inside_{0};
    alignas(64) std::atomic<long> next_{0};
    long count_ = 0;
    long grain_ = 0;
    const void* body_ = nullptr;
    Call call_ = nullptr;
};

// At least `bytes` of this thread's own memory, 64-byte aligned, kept until the next call from the same thread.
void* thread_scratch(long bytes);

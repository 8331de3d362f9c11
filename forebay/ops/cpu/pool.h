// A small thread pool for kernels of a few microseconds to milliseconds.
#pragma once

#include <functional>
#include <vector>

// What a fixed-shape step did, op by op, to be done again on the same addresses.
using Recording = std::vector<std::function<void()>>;

// Where this thread's ops go besides being done, whatever pool runs them; null for nowhere.
Recording*& recording();

class Pool {
  public:
    explicit Pool(int num_threads);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int num_threads() const { return num_threads_; }

    // Calls body(begin, end) over 0..count in pieces of `grain`, on the caller and on any worker that comes in time.
    // Which thread takes a piece is not fixed, so a piece's result must not depend on it. Returns when all are done.
    template <class Body>
    void run(long count, long grain, const Body& body) {
        if (num_threads_ == 1 || count <= grain) {
            if (count > 0) body(0L, count);
            return;
        }
        run_shared(count, grain, &body,
                   [](const void* b, long begin, long end) { (*static_cast<const Body*>(b))(begin, end); });
    }

    // Does an op, which holds its arguments by value; while a recording is made, puts it there instead.
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
    struct Workers;  // in pool.cpp: <thread> and <atomic> would be a third of what most files take to compile
    using Call = void (*)(const void* body, long begin, long end);

    void run_shared(long count, long grain, const void* body, Call call);

    int num_threads_;
    Workers* workers_;
};

// At least `bytes` of this thread's own memory, 64-byte aligned, kept until the next call from the same thread.
void* thread_scratch(long bytes);

// A small thread pool for kernels of a few microseconds to milliseconds.
#pragma once

#include <functional>
#include <vector>

// What a fixed-shape step did, op by op, to be done again on the same addresses.
using Recording = std::vector<std::function<void()>>;

// Where this thread's ops go besides being done, whatever pool runs them; null for nowhere.
Recording*& recording();

// Where threads run. A node is a part of the machine with memory of its own, which it reads faster than the others'.
struct Nodes {
    std::vector<int> of_threads;  // the first is the caller's, whatever it says here
    std::vector<int> of_cpus;     // -1: not ours

    int count() const;
};

class Pool {
  public:
    // A worker runs on the CPUs of its node. With one node, the system chooses a CPU for each thread.
    Pool(int num_threads, const Nodes& nodes);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int num_threads() const { return num_threads_; }

    // Calls body(begin, end) over 0..count in pieces of `grain`, on the caller and on any worker that comes in time.
    // Which thread takes a piece is not fixed, so a piece's result must not depend on it. Returns when all are done.
    //
    // Items i and i + period read the same memory, such as a part of a weight; `period` divides `count`. A node has the
    // same share of each period, so that its threads read what they have touched first. A node whose share is done
    // takes items of the others.
    template <class Body>
    void run(long count, long grain, long period, const Body& body) {
        if (num_threads_ == 1 || count <= grain) {
            if (count > 0) body(0L, count);
            return;
        }
        run_shared(count, grain, period, &body,
                   [](const void* b, long begin, long end) { (*static_cast<const Body*>(b))(begin, end); });
    }

    template <class Body>
    void run(long count, long grain, const Body& body) {
        run(count, grain, count, body);
    }

    // As run, but only the threads of a node do its share. The caller counts as one of the first node.
    template <class Body>
    void run_at_home(long count, long grain, const Body& body) {
        at_home_ = true;
        run(count, grain, body);
        at_home_ = false;
    }

    // The first of `period` items that are a node's; its end is the next one's first.
    long first_of(int node, long period) const { return period * threads_before_[node] / num_threads_; }
    int num_nodes() const { return static_cast<int>(threads_before_.size()) - 1; }

    // How often all threads have met at the end of a run.
    long num_barriers() const { return num_barriers_; }

    // Does an op, which holds its arguments by value; while a recording is made, puts it there instead.
    template <class Op>
    void op(const Op& op) {
        if (recording() != nullptr) {
            recording()->push_back([this, op] { op(*this); });
        } else {
            op(*this);
        }
    }

    // Of about eight pieces per thread.
    long grain_of(long count) const { return (count + 8L * num_threads() - 1) / (8L * num_threads()); }

    template <class Body>
    void run(long count, const Body& body) {
        run(count, grain_of(count), body);
    }

  private:
    struct Workers;  // in pool.cpp: <thread> and <atomic> would be a third of what most files take to compile
    using Call = void (*)(const void* body, long begin, long end);

    void run_shared(long count, long grain, long period, const void* body, Call call);

    int num_threads_;
    std::vector<int> threads_before_;  // those of lower nodes, by node; the last is all of them
    long num_barriers_ = 0;
    bool at_home_ = false;
    Workers* workers_;
};

// At least `bytes` of this thread's own memory, 64-byte aligned, kept until the next call from the same thread.
void* thread_scratch(long bytes);

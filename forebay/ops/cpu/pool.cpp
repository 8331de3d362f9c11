#include "pool.h"

#include <sched.h>

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

int Nodes::count() const { return of_threads.empty() ? 1 : 1 + *std::max_element(of_threads.begin(), of_threads.end()); }

// A node's part of a run: items first..end of each period.
struct Share {
    alignas(64) std::atomic<long> next{0};  // of all its items
    long first = 0;
    long end = 0;
};

struct Pool::Workers {
    Workers(int count, const Nodes& given) : nodes(given), shares(given.count()) {
        for (int i = 0; i < count; ++i) {
            threads.emplace_back([this, node = shares.size() > 1 ? nodes.of_threads[i + 1] : 0] {
                if (shares.size() > 1) stay_on(node);
                work(node);
            });
        }
    }

    ~Workers() {
        stopping = true;
        ticket += 2;
        ticket.notify_all();
        for (auto& thread : threads) thread.join();
    }

    // The calling thread runs on the CPUs of a node from now on. Where the system refuses that, it runs where it did.
    void stay_on(int node) const {
        cpu_set_t cpus;
        CPU_ZERO(&cpus);
        for (size_t cpu = 0; cpu < nodes.of_cpus.size() && cpu < CPU_SETSIZE; ++cpu) {
            if (nodes.of_cpus[cpu] == node) CPU_SET(cpu, &cpus);
        }
        sched_setaffinity(0, sizeof cpus, &cpus);  // pthread's call for it is too new for a wheel
    }

    // The node of the CPU that the caller runs on now.
    int node_here() const {
        if (shares.size() == 1) return 0;
        const size_t cpu = static_cast<size_t>(std::max(0, sched_getcpu()));
        return cpu < nodes.of_cpus.size() ? std::max(0, nodes.of_cpus[cpu]) : 0;
    }

    void take_pieces(int node) {
        const size_t most = at_home ? 1 : shares.size();
        for (size_t i = 0; i < most; ++i) take_share(shares[(node + i) % shares.size()]);
    }

    bool all_taken() const {
        return std::all_of(shares.begin(), shares.end(),
                           [&](const Share& share) { return share.next >= (share.end - share.first) * repeats; });
    }

    void take_share(Share& share) {
        const long size = share.end - share.first, count = size * repeats;
        for (;;) {
            long begin = share.next.fetch_add(grain);
            if (begin >= count) return;
            for (const long end = std::min(begin + grain, count); begin < end;) {
                const long at = begin % size, stop = std::min(end, begin - at + size);
                const long first = begin / size * period + share.first + at;
                call(body, first, first + stop - begin);
                begin = stop;
            }
        }
    }

    void work(int node) {
        uint32_t seen = 0;  // not what the ticket is by now: a job that is open already waits for us, too
        while (!stopping) {
            seen = wait_for_change(seen);
            if (seen % 2 == 0) continue;
            ++inside;
            if (ticket == seen) take_pieces(node);
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
    const Nodes nodes;
    std::vector<Share> shares;  // by node
    long grain = 0;
    long period = 0;
    long repeats = 0;
    bool at_home = false;
    const void* body = nullptr;
    Call call = nullptr;
    std::vector<std::thread> threads;  // last: they use all of the above
};

Pool::Pool(int num_threads, const Nodes& nodes)
    : num_threads_(num_threads), threads_before_(nodes.count() + 1), workers_(new Workers(num_threads - 1, nodes)) {
    for (int node : nodes.of_threads) ++threads_before_[node + 1];
    for (int node = 0; node < nodes.count(); ++node) threads_before_[node + 1] += threads_before_[node];
    threads_before_.back() = num_threads;
}

Pool::~Pool() { delete workers_; }

void Pool::run_shared(long count, long grain, long period, const void* body, Call call) {
    Workers& w = *workers_;
    w.grain = grain;
    w.period = period;
    w.repeats = count / period;
    w.body = body;
    w.call = call;
    for (int node = 0; node < num_nodes(); ++node) {
        w.shares[node].first = first_of(node, period);
        w.shares[node].end = first_of(node + 1, period);
        w.shares[node].next = 0;
    }
    w.at_home = at_home_;
    ++num_barriers_;
    ++w.ticket;
    w.ticket.notify_all();
    w.take_pieces(at_home_ ? 0 : w.node_here());
    while (at_home_ && !w.all_taken()) std::this_thread::yield();  // no other thread may do their shares
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

// thread_nodes [num_threads], cpu_nodes [num_cpus]: see Nodes. No CPUs: one node.
Pool* fb_pool_create(int num_threads, const int* thread_nodes, const int* cpu_nodes, int num_cpus) {
    Nodes nodes;
    if (num_cpus > 0) nodes = {{thread_nodes, thread_nodes + num_threads}, {cpu_nodes, cpu_nodes + num_cpus}};
    return new Pool(num_threads, nodes);
}

long fb_pool_barriers(const Pool* pool) { return pool->num_barriers(); }

// first [nodes + 1]: the items of `period` that each node has, as runs divide them.
void fb_pool_shares(const Pool* pool, long period, long* first) {
    for (int node = 0; node <= pool->num_nodes(); ++node) first[node] = pool->first_of(node, period);
}

// Touches each page of memory that nobody has touched by a thread of the node that will read it: a weight's bytes are
// in the order of its outputs, as its kernels divide them.
void fb_touch(Pool* pool, volatile char* memory, long bytes) {
    constexpr long kPage = 4096;
    const long pages = (bytes + kPage - 1) / kPage;
    pool->run_at_home(pages, std::max(1L, pages / (8 * pool->num_threads())), [=](long begin, long end) {
        for (long page = begin; page < end; ++page) memory[page * kPage] = memory[page * kPage];
    });
}

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

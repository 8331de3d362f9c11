// Copies between the rows of the state tables, after a step that verified: see states.py.
#include <cstdint>
#include <cstring>

#include "pool.h"
#include "stream.h"

namespace {

struct Place {
    char* table;
    int64_t row_bytes;
};

struct Commit {
    const Place* places;  // [num_columns]
    long num_columns;
    const int32_t* slots;        // [num_seqs]
    const int32_t* q_start;      // [num_seqs + 1]
    const int32_t* scratch;      // [tokens]
    const int64_t* positions;    // [tokens]
    const int64_t* num_new;      // [num_seqs]
    const int64_t* wish_lens;    // [num_seqs]
    const int32_t* wish_slots;   // [num_seqs]
    long num_seqs;

    // The state behind the sequence's first `count` tokens to slot `to`.
    void copy(const Place& place, long seq, int64_t count, long to) const {
        const long behind = scratch[q_start[seq] + count - 1], from = behind == 0 ? slots[seq] : behind;
        if (to == 0 || from == to) return;  // C14
        stream_copy(place.table + to * place.row_bytes, place.table + from * place.row_bytes, place.row_bytes);
    }

    void run(const Place& place, long seq) const {
        if (q_start[seq] == q_start[seq + 1]) return;
        const int64_t most = num_new[seq], wished = wish_lens[seq] - positions[q_start[seq]];
        if (most > 0) copy(place, seq, most, slots[seq]);
        if (wished > 0 && wished <= most) copy(place, seq, wished, wish_slots[seq]);
    }
};

}  // namespace

extern "C" void fb_commit_states(Pool* pool, const int64_t* places, long num_columns, const int32_t* slots,
                                 const int32_t* q_start, const int32_t* scratch, const int64_t* positions,
                                 const int64_t* num_new, const int64_t* wish_lens, const int32_t* wish_slots,
                                 long num_seqs) {
    pool->op([=](Pool& p) {
        const Commit commit{reinterpret_cast<const Place*>(places), num_columns, slots, q_start, scratch, positions,
                            num_new, wish_lens, wish_slots, num_seqs};
        p.run(num_columns * num_seqs, 1, [&](long i, long end) {
            for (; i < end; ++i) commit.run(commit.places[i / num_seqs], i % num_seqs);
            end_streams();
        });
    });
}

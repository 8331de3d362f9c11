// What the recurrences share: sequences and their snapshots, blocks of state, and how the work is cut.
//
// An item is one part (some heads or channels) of one sequence, for all of the step's tokens. Its block of state stays in
// L1 meanwhile: it comes from memory once and goes back once. Whatever is done to a token is done in the same order with
// the same instructions for one token as for a thousand, so how a sequence is cut into steps changes no bit.
#pragma once

#include <algorithm>
#include <cstdint>

#include "pool.h"
#include "simd.h"

struct StateBatch {
    const int32_t* slots;       // [num_seqs]
    const int32_t* q_start;     // [num_seqs + 1]
    const int32_t* snap_start;  // [num_seqs + 1]
    const int32_t* snap_ends;
    const int32_t* snap_slots;
    long num_seqs;

    long num_tokens() const { return q_start[num_seqs]; }
};

// The parameters of a C entry point that make a `StateBatch`, and the batch made of them.
#define FOREBAY_BATCH                                                                                        \
    const int32_t *slots, const int32_t *q_start, const int32_t *snap_start, const int32_t *snap_ends,       \
        const int32_t *snap_slots, long num_seqs
#define FOREBAY_BATCH_OF_ARGUMENTS StateBatch{slots, q_start, snap_start, snap_ends, snap_slots, num_seqs}

// Calls body(sequence, part) for every part 0..parts of every sequence that has tokens.
template <class Body>
void for_each_part(Pool& pool, const StateBatch& batch, long parts, const Body& body) {
    const auto some = [&](long begin, long end) {
        for (long i = begin; i < end; ++i) {
            const long seq = i / parts;
            if (batch.q_start[seq] < batch.q_start[seq + 1]) body(seq, i % parts);
        }
    };
    const long count = batch.num_seqs * parts;
    if (batch.num_tokens() > batch.num_seqs) {
        pool.run(count, 1, some);  // a long sequence's parts must not end up in one thread's piece
    } else {
        pool.run(count, some);
    }
}

// Calls run(first token, end) for the stretches of a sequence between its snapshots, and save(slot) where one is due.
template <class Run, class Save>
void for_each_stretch(const StateBatch& batch, long seq, const Run& run, const Save& save) {
    long begin = batch.q_start[seq];
    for (long i = batch.snap_start[seq]; i < batch.snap_start[seq + 1]; ++i) {
        run(begin, static_cast<long>(batch.snap_ends[i]));
        begin = batch.snap_ends[i];
        if (batch.snap_slots[i] != 0) save(batch.snap_slots[i]);
    }
    run(begin, static_cast<long>(batch.q_start[seq + 1]));
}

// Some entries of every slot of a state table: `rows` of `columns`, `stride` apart, from `offset` of a slot.
struct BlockShape {
    long offset;
    long rows;
    long columns;
    long stride;
};

// One item's block, in place in the table; a copy of it if the slot is 0, which is not written (C14).
template <class S>
class StateBlock {
  public:
    // `spare` holds rows x columns entries.
    StateBlock(S* table, long slot_entries, const BlockShape& shape, long slot, S* spare)
        : table_(table + shape.offset), slot_entries_(slot_entries), shape_(shape), stride_(shape.stride) {
        at_ = table_ + slot * slot_entries_;
        if (slot != 0) return;
        for (long r = 0; r < shape.rows; ++r) std::copy_n(at_ + r * stride_, shape.columns, spare + r * shape.columns);
        at_ = spare;
        stride_ = shape.columns;
    }

    S* row(long r) const { return at_ + r * stride_; }
    long stride() const { return stride_; }

    void copy_to(long slot) const {
        for (long r = 0; r < shape_.rows; ++r) {
            std::copy_n(row(r), shape_.columns, table_ + slot * slot_entries_ + r * shape_.stride);
        }
    }

  private:
    S* table_;
    long slot_entries_;
    BlockShape shape_;
    S* at_;
    long stride_;
};

// to [n rounded up to whole vectors] = from * factor, zeros behind.
template <class T>
void widen_row(const T* from, long n, Vec factor, float* to) {
    for_each_vector(n, [&](long i, long part) { store(to + i, load_part(from + i, part) * factor); });
}

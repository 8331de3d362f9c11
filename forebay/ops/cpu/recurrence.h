// What the recurrences share: sequences and their snapshots, blocks of state, and how the work is cut.
//
// An item is one part (some heads or channels) of one sequence, for all of the step's tokens. Its block of state stays in
// L1 meanwhile: it comes from memory once and goes back once. Whatever is done to a token is done in the same order with
// the same instructions for one token as for a thousand, so how a sequence is cut into steps changes no bit.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "pool.h"
#include "simd.h"
#include "stream.h"

struct StateBatch {
    const int32_t* slots;        // [num_seqs]
    const int32_t* write_slots;  // [num_seqs]
    const int32_t* q_start;      // [num_seqs + 1]
    const int32_t* q_stop;       // [num_seqs]
    const int32_t* snap_start;   // [num_seqs + 1]
    const int32_t* snap_ends;
    const int32_t* snap_slots;
    long num_seqs;

    long num_tokens() const { return q_start[num_seqs]; }
};

// The parameters of a C entry point that make a `StateBatch`, and the batch made of them.
#define FOREBAY_BATCH                                                                                        \
    const int32_t *slots, const int32_t *write_slots, const int32_t *q_start, const int32_t *q_stop,         \
        const int32_t *snap_start, const int32_t *snap_ends, const int32_t *snap_slots, long num_seqs
#define FOREBAY_BATCH_OF_ARGUMENTS \
    StateBatch { slots, write_slots, q_start, q_stop, snap_start, snap_ends, snap_slots, num_seqs }

// In its scope what is smaller than a normal number is zero. A state that dies away passes through such numbers, and each
// product with one takes the CPU a hundred times as long.
class FlushToZero {
  public:
    FlushToZero() : before_(float_mode()) { set_float_mode(before_ | kFlushToZero); }
    ~FlushToZero() { set_float_mode(before_); }
    FlushToZero(const FlushToZero&) = delete;
    FlushToZero& operator=(const FlushToZero&) = delete;

  private:
    decltype(float_mode()) before_;
};

// Calls body(sequence, part) for every part 0..parts of every sequence that has tokens.
template <class Body>
void for_each_part(Pool& pool, const StateBatch& batch, long parts, const Body& body) {
    const auto some = [&](long begin, long end) {
        const FlushToZero scope;
        for (long i = begin; i < end; ++i) {
            const long seq = i / parts;
            if (batch.q_start[seq] < batch.q_stop[seq]) body(seq, i % parts);
        }
    };
    long live = batch.num_seqs;  // those behind are padding
    while (live > 0 && batch.q_stop[live - 1] == batch.q_start[live - 1]) --live;
    const long count = live * parts;
    if (batch.num_tokens() > live) {
        pool.run(count, 1, some);  // a long sequence's parts must not end up in one thread's piece
    } else {
        pool.run(count, some);
    }
}

// Some entries of every slot of a state table: `rows` of `columns`, `stride` apart, from `offset` of a slot.
struct BlockShape {
    long offset;
    long rows;
    long columns;
    long stride;
};

// One item's block: in place in the table, or a dense copy in `spare`, which holds rows x columns entries. A block that
// goes nowhere, as those of slot 0 do (C14), is always copied.
template <class S>
class StateBlock {
  public:
    StateBlock(S* table, long slot_entries, const BlockShape& shape, const StateBatch& batch, long seq, S* spare)
        : table_(table + shape.offset), slot_entries_(slot_entries), shape_(shape), slot_(batch.write_slots[seq]),
          at_(table_ + batch.slots[seq] * slot_entries), stride_(shape.stride) {
        // Rows that lie apart in the table are in so few of L1's sets that they drive each other out: for one token
        // that does not matter.
        const bool dense = shape.columns == shape.stride, once = batch.q_stop[seq] - batch.q_start[seq] == 1;
        in_place_ = slot_ != 0 && slot_ == batch.slots[seq] && (dense || once);
        if (in_place_) return;
        for (long r = 0; r < shape.rows; ++r) std::copy_n(at_ + r * stride_, shape.columns, spare + r * shape.columns);
        at_ = spare;
        stride_ = shape.columns;
    }

    S* at() const { return at_; }
    long stride() const { return stride_; }

    void copy_to(long slot) const {
        for (long r = 0; r < shape_.rows; ++r) std::copy_n(at_ + r * stride_, shape_.columns, row(slot, r));
    }

    // As copy_to, for a slot that nobody reads soon.
    void stream_to(long slot) const {
        for (long r = 0; r < shape_.rows; ++r) {
            stream_copy(row(slot, r), at_ + r * stride_, shape_.columns * static_cast<long>(sizeof(S)));
        }
        end_streams();
    }

    // Puts the block where the sequence's state goes.
    void finish() const {
        if (!in_place_ && slot_ != 0) copy_to(slot_);
    }

  private:
    S* row(long slot, long r) const { return table_ + slot * slot_entries_ + r * shape_.stride; }

    S* table_;
    long slot_entries_;
    BlockShape shape_;
    long slot_;  // to write
    S* at_;
    long stride_;
    bool in_place_;
};

// How many vectors side by side a kernel takes at once.
template <int kCount>
using Count = std::integral_constant<int, kCount>;

constexpr long kColumns = 4 * W;  // of a part: 128 rows of float32 are then 32 KiB with AVX-512, 16 KiB with AVX2

// Calls body(Count, first column, lanes) until all columns are done: for four vectors, two or one at a time.
template <class Body>
void for_each_columns(long columns, const Body& body) {
    long i = 0;
    for (; i + 4 * W <= columns; i += 4 * W) body(Count<4>(), i, static_cast<long>(W));
    for (; i + 2 * W <= columns; i += 2 * W) body(Count<2>(), i, static_cast<long>(W));
    for_each_vector(columns - i, [&](long j, long lanes) { body(Count<1>(), i + j, lanes); });
}

// Calls run(first token, end) for the stretches of a sequence between its snapshots, and save(slot) where one is due.
// An entry with slot 0 is none, and its end means nothing.
template <class Run, class Save>
void for_each_stretch(const StateBatch& batch, long seq, const Run& run, const Save& save) {
    long begin = batch.q_start[seq];
    for (long i = batch.snap_start[seq]; i < batch.snap_start[seq + 1]; ++i) {
        if (batch.snap_slots[i] == 0) continue;
        run(begin, static_cast<long>(batch.snap_ends[i]));
        begin = batch.snap_ends[i];
        save(batch.snap_slots[i]);
    }
    run(begin, static_cast<long>(batch.q_stop[seq]));
}

// As for_each_stretch, for a state that is a block.
template <class S, class Run>
void run_block(const StateBatch& batch, long seq, const StateBlock<S>& block, const Run& run) {
    for_each_stretch(batch, seq, run, [&](long slot) { block.stream_to(slot); });
    block.finish();
}

// to [n rounded up to whole vectors] = from * factor, zeros behind.
template <class T>
void widen_row(const T* from, long n, Vec factor, float* to) {
    for_each_vector(n, [&](long i, long part) { store(to + i, load_part(from + i, part) * factor); });
}

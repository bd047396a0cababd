// Sizes and offsets that every rank computes alike: rows of the dispatched buffer, parts of a rank's shared chunk.
#pragma once

#include <cstdint>

#include "xla_ffi/core/team.h"

namespace moonep {

// `multiple` is a power of two.
MOONEP_HD constexpr int64_t AlignUp(int64_t value, int64_t multiple) { return (value + multiple - 1) & -multiple; }
// The same for rows of one group, in the arithmetic that a device is fast at.
MOONEP_HD constexpr int32_t PadRows(int32_t rows, int32_t padding) { return (rows + padding - 1) & -padding; }

// Static numbers of one domain; equal on all ranks (setup compares them).
struct DomainShape {
  int32_t ranks = 1;
  int32_t experts = 1;
  int32_t topk = 1;
  int32_t tokens = 1;     // capacity per rank
  int32_t padding = 1;    // group sizes are padded to a multiple of it
  bool home = false;      // planner="home": nothing moves
  bool exact = false;     // combine="exact"
  int32_t hidden = 1;     // elements of a row
  int32_t row_bytes = 4;  // hidden * size of an element
  int64_t stage_bytes = 0;

  MOONEP_HD int32_t epn() const { return experts / ranks; }
  MOONEP_HD int32_t groups() const { return 2 * epn(); }
  MOONEP_HD int32_t home_of(int32_t expert) const { return expert / epn(); }

  // Rows of the dispatched buffer for s tokens per rank.
  MOONEP_HD int64_t recv_rows(int64_t s) const {
    const int64_t rows = home ? s * topk * ranks : s * topk;
    const int64_t padded_groups = home ? epn() : groups();
    return AlignUp(rows + (padding - 1) * padded_groups, padding);
  }
};

// Parts of a rank's chunk after its control block; each starts on a 4 KiB page. A rank writes ids, counts, rows,
// weights and slots of its own chunk; returns and return_weights are written by the ranks that computed the rows.
struct ChunkLayout {
  int64_t row_stride = 0;      // bytes from row to row: rows start on cache lines whatever H is
  int64_t ids = 0;             // [tokens, topk] int32
  int64_t counts = 0;          // [experts] int32
  int64_t rows = 0;            // [tokens] rows
  int64_t weights = 0;         // [tokens, topk] float32
  int64_t returns = 0;         // [tokens, topk] rows
  int64_t return_weights = 0;  // [tokens, topk] float32
  int64_t slots = 0;           // stage_bytes: expert weights (prefetch) or their gradients (reduce_grad)
  int64_t bytes = 0;           // of the whole chunk

  static ChunkLayout Of(const DomainShape& d, int64_t control_bytes) {
    constexpr int64_t kPage = 4096;
    ChunkLayout l;
    l.row_stride = AlignUp(d.row_bytes, 64);
    const int64_t assignments = static_cast<int64_t>(d.tokens) * d.topk;
    int64_t at = control_bytes;
    auto part = [&at](int64_t bytes) {
      at = AlignUp(at, kPage);
      const int64_t start = at;
      at += bytes;
      return start;
    };
    l.ids = part(assignments * 4);
    l.counts = part(static_cast<int64_t>(d.experts) * 4);
    l.rows = part(d.tokens * l.row_stride);
    l.weights = part(assignments * 4);
    l.returns = part(assignments * l.row_stride);
    l.return_weights = part(assignments * 4);
    l.slots = part(d.stage_bytes);
    l.bytes = AlignUp(at, kPage);
    return l;
  }
};

}  // namespace moonep

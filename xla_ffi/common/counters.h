// What a rank counts for ep.stats(): plain sums that only grow. Host and device; free of XLA and CUDA.
#pragma once

#include <cstdint>

#include "xla_ffi/common/operands.h"

namespace moonep {

struct Counters {
  uint64_t calls[kKinds];    // calls done (GPU: begun)
  uint64_t wait_ns[kKinds];  // time that calls waited for other ranks
  uint64_t bytes[kKinds];    // moved by this rank from or to another one (not counted on GPUs)
  // Of the plans that the rank made.
  uint64_t rows;           // rows that the rank computes
  uint64_t link_rows;      // of them, those that come from other ranks, once per token
  uint64_t moved_experts;  // foreign experts that the rank computes

  Counters& operator+=(const Counters& o) {
    for (int64_t k = 0; k < kKinds; ++k) {
      calls[k] += o.calls[k];
      wait_ns[k] += o.wait_ns[k];
      bytes[k] += o.bytes[k];
    }
    rows += o.rows;
    link_rows += o.link_rows;
    moved_experts += o.moved_experts;
    return *this;
  }
};

}  // namespace moonep

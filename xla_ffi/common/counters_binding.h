// Counters as a Python dict, the same for both modules.
#pragma once

#include <nanobind/nanobind.h>

#include "xla_ffi/common/counters.h"

namespace moonep {

// {"calls": {op: n}, "wait_ns": {op: ns}, "bytes": {op: n}, "rows": n, "link_rows": n, "moved_experts": n}
inline nanobind::dict CountersDict(const Counters& c) {
  const auto by_op = [](const uint64_t (&values)[kKinds]) {
    nanobind::dict d;
    for (int64_t k = 0; k < kKinds; ++k) d[KindName(k)] = values[k];
    return d;
  };
  nanobind::dict d;
  d["calls"] = by_op(c.calls);
  d["wait_ns"] = by_op(c.wait_ns);
  d["bytes"] = by_op(c.bytes);
  d["rows"] = c.rows;
  d["link_rows"] = c.link_rows;
  d["moved_experts"] = c.moved_experts;
  return d;
}

}  // namespace moonep

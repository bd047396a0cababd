// The threads that run an algorithm of this folder together: one on the host, one warp or one block on a device.
//
// The planner is written once against this concept: rank(), size(), sync(), single(f), sum(n, f), largest(n, f), and
// scan(n, f, sink). Nothing in xla_ffi/core includes XLA or CUDA headers.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define MOONEP_HD __host__ __device__
#else
#define MOONEP_HD
#endif

namespace moonep {

struct Largest {
  int32_t value;
  int32_t index;
};

struct SerialTeam {
  MOONEP_HD int rank() const { return 0; }
  MOONEP_HD int size() const { return 1; }
  MOONEP_HD void sync() const {}

  // Runs f on one thread; all threads see its writes afterwards.
  template <class F>
  MOONEP_HD void single(F f) const {
    f();
  }

  template <class F>
  MOONEP_HD int32_t sum(int n, F value) const {
    int32_t total = 0;
    for (int i = 0; i < n; ++i) total += value(i);
    return total;
  }

  // The largest value(i), i in [0, n), and where it is; ties go to the lowest index.
  template <class F>
  MOONEP_HD Largest largest(int n, F value) const {
    Largest best{value(0), 0};
    for (int i = 1; i < n; ++i) {
      const int32_t v = value(i);
      if (v > best.value) best = {v, i};
    }
    return best;
  }

  // Calls sink(i, value(0) + ... + value(i - 1)) for i in [0, n); returns the sum of all.
  template <class F, class Sink>
  MOONEP_HD int64_t scan(int n, F value, Sink sink) const {
    int64_t before = 0;
    for (int i = 0; i < n; ++i) {
      const int64_t here = value(i);
      sink(i, before);
      before += here;
    }
    return before;
  }
};

}  // namespace moonep

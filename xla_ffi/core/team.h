// The threads that run an algorithm of this folder together: one on the host, one warp or one block on a device.
//
// The planner is written once against this concept: rank(), size(), sync(), single(f), take(counter), sum(n, f),
// largest(n, f), scan(n, f, sink), and board(n, f, array): few numbers whose largest and smallest are asked for again
// and again, which a device keeps in registers. Nothing in xla_ffi/core includes XLA or CUDA headers.
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

class SerialBoard {
 public:
  MOONEP_HD SerialBoard(int n, int32_t* values) : n_(n), values_(values) {}

  // Ties go to the lowest index.
  MOONEP_HD Largest largest() const { return Best(1); }
  MOONEP_HD Largest smallest() const {
    const Largest best = Best(-1);
    return {-best.value, best.index};
  }
  MOONEP_HD void add(int index, int32_t delta) { values_[index] += delta; }
  MOONEP_HD void store() const {}

 private:
  MOONEP_HD Largest Best(int32_t sign) const {
    Largest best{sign * values_[0], 0};
    for (int i = 1; i < n_; ++i) {
      if (sign * values_[i] > best.value) best = {sign * values_[i], i};
    }
    return best;
  }

  int n_;
  int32_t* values_;
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

  // The counter before it goes up by one; it may be shared with other teams.
  MOONEP_HD int32_t take(int32_t* counter) const { return (*counter)++; }

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

  // value(i), i in [0, n), to change and to compare; store() writes them to `array`, which is the board's until then.
  template <class F>
  MOONEP_HD SerialBoard board(int n, F value, int32_t* array) const {
    for (int i = 0; i < n; ++i) array[i] = value(i);
    return SerialBoard(n, array);
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

// The progress thread of one local rank: posts calls, executes the log, watches the limits; on rank 0 it also leads.
//
// A handler only submits. The thread posts the call's key in shared memory; the leader appends a key to its log once
// every rank has posted it; every rank executes the log in order. So an entry exists only when all ranks hold its
// operands, all ranks agree on the order, and no XLA thread ever waits. Calls of one key match within one launch of the
// program.
#pragma once

#include <array>
#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "xla_ffi/common/counters.h"
#include "xla_ffi/common/registry.h"
#include "xla_ffi/cpu/call.h"
#include "xla_ffi/cpu/leader.h"

namespace moonep {

struct RankOptions {
  int64_t limit_ns = 0;        // from a call's post to its end
  int64_t first_limit_ns = 0;  // the same, the first time that this rank makes the call (peers may still compile)
  int64_t delay_ns = 0;        // random delay before each post, for tests
  uint64_t delay_seed = 0;
};

class LocalRank {
 public:
  LocalRank(RankView view, RankOptions options);
  ~LocalRank() { Stop(); }

  void Start();
  // Fails the calls in flight with "domain closed", then joins. Idempotent.
  void Stop();
  // Never waits. The call's `done` runs exactly once, on a thread of its own.
  void Submit(std::unique_ptr<Call> call);
  // Puts the group in error, from any thread (what a check outside of the calls has found). A first error stays.
  void Fail(const Failure& failure);
  // The group's first error, if any.
  Failure error();
  // Log entries executed by this rank.
  uint64_t executed() const { return view_.control(view_.rank).executed.load(); }
  Counters counters();
  const RankView& view() const { return view_; }

 private:
  struct Waiting {
    std::unique_ptr<Call> call;
    int64_t ready_ns = 0;
    uint64_t order = 0;
  };
  struct Posted {
    std::unique_ptr<Call> call;
    int slot = 0;
    int64_t posted_ns = 0;
    int64_t limit_ns = 0;
    int64_t work_ns = 0;  // spent on its copies
  };
  enum class Phase { kIdle, kRegion, kAllIn };

  void Loop();
  bool PostCalls();
  bool Advance();
  bool BeginEntry();
  bool FinishEntry();
  void Count(const Posted& done);
  void PublishStep();
  bool AllReached(uint64_t step) const;
  void AdoptError();
  void Watch();
  bool HasPosted(int32_t rank, const Call& call, bool same_launch) const;
  // Ranks that keep a call waiting; *how says what they did instead.
  std::vector<int32_t> Missing(const Posted& posted, const char** how) const;
  std::string TimeoutText(const Posted& posted) const;
  void Raise(Failure failure);
  void FailAll(const Failure& failure);
  int64_t SleepNs() const;
  ControlBlock& own() const { return view_.control(view_.rank); }
  ControlBlock& leader() const { return view_.control(0); }
  void RingAll() const;

  const RankView view_;
  const RankOptions options_;
  std::thread thread_;
  std::atomic<bool> stop_{false};

  std::mutex mutex_;  // guards the four below; held for moments, never while calling out
  std::deque<Waiting> inbox_;
  Failure error_;
  Counters counters_ = {};
  uint64_t submitted_ = 0;

  // The rest belongs to the progress thread.
  std::mt19937_64 random_;
  std::deque<Waiting> waiting_;
  std::map<CallKey, Posted> posted_;
  std::set<std::tuple<uint64_t, uint64_t, uint64_t>> called_;  // (kind, channel, site) made before
  std::vector<int> free_slots_;
  std::array<uint64_t, kRegions> region_free_{};  // step at which the region's last user had copied out
  uint64_t step_ = 0;
  uint64_t entry_ = 0;  // next log entry
  Phase phase_ = Phase::kIdle;
  bool failed_ = false;  // by the group's first error: nothing is posted or executed any more
  Posted current_;
  int64_t round_ = 0;
  int64_t rounds_ = 0;
  std::unique_ptr<Leader> leader_duty_;  // on rank 0
};

// By device id: what XLA:CPU gives a handler as its ordinal.
using CpuRegistry = Registry<LocalRank>;

}  // namespace moonep

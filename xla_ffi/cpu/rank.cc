#include "xla_ffi/cpu/rank.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "xla_ffi/common/messages.h"
#include "xla_ffi/cpu/completer.h"

namespace moonep {
namespace {

constexpr int64_t kIdleNs = 200'000'000;  // a lost wake-up would cost this much, never a hang

void Complete(std::unique_ptr<Call> call, const Failure& failure) {
  if (failure) call->Poison(false);
  std::function<void(const Failure&)> done = std::move(call->done);
  call.reset();  // before the program goes on: its buffers are XLA's again
  Completer::Get().Run([done = std::move(done), failure] { done(failure); });
}

}  // namespace

LocalRank::LocalRank(RankView view, RankOptions options)
    : view_(std::move(view)),
      options_(options),
      random_(options.delay_seed * 1000003 + static_cast<uint64_t>(view_.rank)) {
  for (int i = ControlBlock::kSlots; i-- > 0;) free_slots_.push_back(i);
  if (view_.rank == 0) leader_duty_ = std::make_unique<Leader>(view_);
}

void LocalRank::Start() {
  thread_ = std::thread([this] { Loop(); });
}

void LocalRank::Stop() {
  if (!thread_.joinable()) return;
  stop_.store(true);
  own().bell.Ring();
  thread_.join();
}

void LocalRank::Submit(std::unique_ptr<Call> call) {
  Failure refused;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    refused = error_;
    if (!refused) {
      inbox_.push_back({std::move(call), 0, ++submitted_});
      own().bell.Ring();  // under the lock: Stop sets error_ before the memory of the bell goes
    }
  }
  if (refused) Complete(std::move(call), refused);
}

Failure LocalRank::error() {
  if (leader().origin.load() != 0) {
    const uint32_t origin = leader().origin.load() - 1;
    const ControlBlock& block = view_.control(static_cast<int32_t>(origin));
    return {static_cast<Failure::Code>(block.error_code.load()), block.error_text};
  }
  return {};
}

Counters LocalRank::counters() {
  std::lock_guard<std::mutex> lock(mutex_);
  return counters_;
}

void LocalRank::RingAll() const {
  for (int32_t r = 0; r < view_.shape.ranks; ++r) view_.control(r).bell.Ring();
}

void LocalRank::Loop() {
  while (!stop_.load()) {
    const uint32_t snapshot = own().bell.Snapshot();
    AdoptError();
    bool moved = false;
    if (!failed_) {
      moved = PostCalls();
      if (leader_duty_) moved |= leader_duty_->Match();
      if (!failed_) moved |= Advance();
    }
    if (!moved) {
      Watch();
      own().bell.Wait(snapshot, SleepNs());
    }
  }
  own().closed.store(1);
  RingAll();
  const std::string text = view_.group + ": domain closed while the call was in flight; " +
                           view_.labels[static_cast<size_t>(view_.rank)] + " called close()";
  FailAll({Failure::kClosed, text});
}

bool LocalRank::PostCalls() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    while (!inbox_.empty()) {
      waiting_.push_back(std::move(inbox_.front()));
      inbox_.pop_front();
      const int64_t delay =
          options_.delay_ns > 0 ? static_cast<int64_t>(random_() % static_cast<uint64_t>(options_.delay_ns)) : 0;
      waiting_.back().ready_ns = NowNs() + delay;
    }
  }
  bool moved = false;
  const int64_t now = NowNs();
  for (auto it = waiting_.begin(); it != waiting_.end() && !free_slots_.empty();) {
    if (it->ready_ns > now) {
      ++it;
      continue;
    }
    const CallKey key = it->call->key;
    // Calls of one place and launch that depend on each other through data are never in flight together. Others could
    // meet the wrong partner on another rank, so they are an error, not a guess.
    if (posted_.count(key) != 0 || (phase_ != Phase::kIdle && current_.call->key == key)) {
      Raise(
          {Failure::kInvalid, std::string(KindName(static_cast<int64_t>(key.kind))) +
                                  ": two calls of one place in the program are in flight; got a second one before the "
                                  "first was done (" +
                                  Describe(key) + ", " + view_.labels[static_cast<size_t>(view_.rank)] +
                                  "), expected one after the other; give independent calls a channel each: a function "
                                  "that is compiled once and applied twice has one place"});
      return true;
    }
    Posted posted;
    posted.slot = free_slots_.back();
    free_slots_.pop_back();
    posted.posted_ns = now;
    const bool first = called_.insert({key.kind, key.channel, key.site}).second;
    posted.limit_ns = first ? options_.first_limit_ns : options_.limit_ns;
    PostSlot& slot = own().posts[posted.slot];
    slot.key.Set(key);
    slot.order.store(it->order);
    if (own().slots_used.load() <= static_cast<uint32_t>(posted.slot)) {
      own().slots_used.store(static_cast<uint32_t>(posted.slot) + 1);
    }
    posted.call = std::move(it->call);
    posted_.emplace(key, std::move(posted));
    it = waiting_.erase(it);
    moved = true;
  }
  if (moved && view_.rank != 0) leader().bell.Ring();
  return moved;
}

bool LocalRank::AllReached(uint64_t step) const {
  for (int32_t r = 0; r < view_.shape.ranks; ++r) {
    if (view_.control(r).steps.load() < step) return false;
  }
  return true;
}

void LocalRank::PublishStep() {
  own().steps.store(++step_);
  // The last to arrive wakes the others. Two that arrive last at once both see each other (seq_cst) and both ring.
  if (AllReached(step_)) RingAll();
}

bool LocalRank::BeginEntry() {
  if (entry_ >= leader().log_head.load()) return false;
  const CallKey key = leader().log[entry_ % ControlBlock::kLog].key.Get();
  auto it = posted_.find(key);
  if (it == posted_.end()) {
    Raise({Failure::kInternal, std::string(KindName(static_cast<int64_t>(key.kind))) + ": the log names a call that " +
                                   view_.labels[static_cast<size_t>(view_.rank)] + " did not post (" + Describe(key) +
                                   "); this is a bug in moonep_jax"});
    return true;
  }
  current_ = std::move(it->second);
  posted_.erase(it);
  if (view_.poison) current_.call->Poison(true);
  phase_ = Phase::kRegion;
  round_ = 0;
  rounds_ = current_.call->Rounds(view_);
  const int64_t start = NowNs();
  std::string wrong = current_.call->Begin(view_, entry_);
  current_.work_ns += NowNs() - start;
  if (!wrong.empty()) {
    Raise({Failure::kInvalid, std::move(wrong)});
  } else if (rounds_ == 0) {
    FinishEntry();
  }
  return true;
}

void LocalRank::Count(const Posted& done) {
  const int64_t waited = NowNs() - done.posted_ns - done.work_ns;
  const size_t kind = static_cast<size_t>(done.call->key.kind);
  const Traffic& t = done.call->traffic;
  std::lock_guard<std::mutex> lock(mutex_);
  counters_.calls[kind] += 1;
  counters_.wait_ns[kind] += static_cast<uint64_t>(waited);
  counters_.bytes[kind] += static_cast<uint64_t>(t.bytes);
  counters_.rows += static_cast<uint64_t>(t.rows);
  counters_.link_rows += static_cast<uint64_t>(t.link_rows);
  counters_.moved_experts += static_cast<uint64_t>(t.moved_experts);
}

bool LocalRank::FinishEntry() {
  Count(current_);  // before the program goes on and may ask
  own().posts[current_.slot].order.store(0);
  free_slots_.push_back(current_.slot);
  own().executed.store(++entry_);
  // The leader waits for room in the log only when a rank lags far behind.
  if (entry_ % (ControlBlock::kLog / 4) == 0 && view_.rank != 0) leader().bell.Ring();
  phase_ = Phase::kIdle;
  Complete(std::move(current_.call), {});
  return true;
}

bool LocalRank::Advance() {
  if (phase_ == Phase::kIdle) return BeginEntry();
  std::string wrong;
  uint64_t& region_free = region_free_[static_cast<size_t>(current_.call->region())];
  if (phase_ == Phase::kRegion) {
    if (!AllReached(region_free)) return false;
    const int64_t start = NowNs();
    wrong = current_.call->CopyIn(view_, round_);
    current_.work_ns += NowNs() - start;
    if (wrong.empty()) {
      PublishStep();
      phase_ = Phase::kAllIn;
    }
  } else {
    if (!AllReached(step_)) return false;
    const int64_t start = NowNs();
    wrong = current_.call->CopyOut(view_, round_);
    current_.work_ns += NowNs() - start;
    if (wrong.empty()) {
      PublishStep();
      region_free = step_;
      phase_ = Phase::kRegion;
      if (++round_ == rounds_) return FinishEntry();
    }
  }
  if (!wrong.empty()) Raise({Failure::kInvalid, std::move(wrong)});
  return true;
}

bool LocalRank::HasPosted(int32_t rank, const Call& call, bool same_launch) const {
  const ControlBlock& block = view_.control(rank);
  const uint32_t used = std::min<uint32_t>(block.slots_used.load(), ControlBlock::kSlots);
  for (uint32_t i = 0; i < used; ++i) {
    const PostSlot& slot = block.posts[i];
    if (slot.order.load() == 0) continue;
    const CallKey key = slot.key.Get();
    if (same_launch ? key == call.key : key.SamePlace(call.key)) return true;
  }
  return false;
}

std::vector<int32_t> LocalRank::Missing(const Posted& posted, const char** how) const {
  std::vector<int32_t> missing;
  *how = "took part but stopped moving data";
  if (phase_ != Phase::kIdle) {  // an entry is being executed, this one or one before it
    const uint64_t needed =
        phase_ == Phase::kAllIn ? step_ : region_free_[static_cast<size_t>(current_.call->region())];
    for (int32_t r = 0; r < view_.shape.ranks; ++r) {
      if (view_.control(r).steps.load() < needed) missing.push_back(r);
    }
  } else {
    for (const bool same_launch : {false, true}) {
      *how = same_launch ? "made the call in another program or launch (other shapes, or another order of programs)"
                         : "did not make the call";
      for (int32_t r = 0; r < view_.shape.ranks; ++r) {
        if (!HasPosted(r, *posted.call, same_launch)) missing.push_back(r);
      }
      if (!missing.empty()) break;
    }
  }
  if (missing.empty()) missing.push_back(0);  // all have posted: the leader does not append
  return missing;
}

std::string LocalRank::TimeoutText(const Posted& posted) const {
  const char* how = nullptr;
  const std::vector<int32_t> missing = Missing(posted, &how);
  const CallKey key = phase_ != Phase::kIdle ? current_.call->key : posted.call->key;
  std::vector<int32_t> present;
  std::string culprits;
  for (int32_t r = 0; r < view_.shape.ranks; ++r) {
    if (std::find(missing.begin(), missing.end(), r) == missing.end()) {
      present.push_back(r);
    } else {
      culprits += (culprits.empty() ? "" : ", ") + view_.labels[static_cast<size_t>(r)];
    }
  }
  return std::string(KindName(static_cast<int64_t>(key.kind))) + ": missing ranks " + List(missing) + " after " +
         Seconds(posted.limit_ns) + "; got ranks " + List(present) + " of " + view_.group + ", expected all " +
         std::to_string(view_.shape.ranks) + "; " + culprits + " " + how +
         " - it may have died, be stuck, or have taken another branch; if it is only slow, raise timeout_s or "
         "first_call_timeout_s (" +
         Describe(key) + ", seen by " + view_.labels[static_cast<size_t>(view_.rank)] + ")";
}

void LocalRank::Watch() {
  const int64_t now = NowNs();
  auto overdue = [&](const Posted& p) {
    if (now - p.posted_ns < p.limit_ns) return false;
    Raise({Failure::kDeadline, TimeoutText(p)});
    return true;
  };
  if (phase_ != Phase::kIdle && overdue(current_)) return;
  for (const auto& [key, p] : posted_) {
    if (overdue(p)) return;
    if (phase_ != Phase::kIdle || entry_ < leader().log_head.load()) continue;
    const char* how = nullptr;
    std::vector<int32_t> closed;
    std::string culprits;
    for (int32_t r : Missing(p, &how)) {
      if (view_.control(r).closed.load() == 0) continue;
      closed.push_back(r);
      culprits += (culprits.empty() ? "" : ", ") + view_.labels[static_cast<size_t>(r)];
    }
    if (closed.empty()) continue;
    // A call that moves nothing waits for nobody: it may have been logged since, and those ranks done with it.
    if (entry_ < leader().log_head.load()) return;
    const std::string op = std::string(KindName(static_cast<int64_t>(key.kind))) + ": ";
    Raise({Failure::kClosed, ClosedByPeer(op, List(closed), culprits) + " (" + Describe(key) + ", seen by " +
                                 view_.labels[static_cast<size_t>(view_.rank)] + ")"});
    return;
  }
}

int64_t LocalRank::SleepNs() const {
  const int64_t now = NowNs();
  int64_t until = now + kIdleNs;
  for (const Waiting& w : waiting_) until = std::min(until, w.ready_ns);
  if (phase_ != Phase::kIdle) until = std::min(until, current_.posted_ns + current_.limit_ns);
  for (const auto& [key, p] : posted_) until = std::min(until, p.posted_ns + p.limit_ns);
  return std::max<int64_t>(until - now, 0);
}

void LocalRank::Raise(Failure failure) {
  Fail(failure);
  AdoptError();
}

void LocalRank::Fail(const Failure& failure) {
  std::lock_guard<std::mutex> lock(mutex_);  // one writer of the text; Stop sets error_ before the memory goes
  if (error_ || leader().origin.load() != 0) return;
  ControlBlock& block = own();
  block.error_code.store(failure.code);
  std::strncpy(block.error_text, failure.text.c_str(), ControlBlock::kText - 1);
  uint32_t none = 0;
  leader().origin.compare_exchange_strong(none, static_cast<uint32_t>(view_.rank) + 1);
  RingAll();
}

void LocalRank::AdoptError() {
  Failure first = error();
  if (!first) return;
  bool fresh = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!error_) {
      fresh = true;
      error_ = first;
    }
  }
  if (!fresh) return;
  failed_ = true;
  FailAll(first);
}

void LocalRank::FailAll(const Failure& failure) {
  std::vector<std::unique_ptr<Call>> calls;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!error_) error_ = failure;
    for (Waiting& w : inbox_) calls.push_back(std::move(w.call));
    inbox_.clear();
  }
  for (Waiting& w : waiting_) calls.push_back(std::move(w.call));
  waiting_.clear();
  for (auto& [key, p] : posted_) calls.push_back(std::move(p.call));
  posted_.clear();
  if (phase_ != Phase::kIdle) calls.push_back(std::move(current_.call));
  phase_ = Phase::kIdle;
  for (auto& call : calls) Complete(std::move(call), failure);
}

}  // namespace moonep

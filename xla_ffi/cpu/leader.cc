#include "xla_ffi/cpu/leader.h"

#include <algorithm>
#include <string>

#include "xla_ffi/common/messages.h"

namespace moonep {

Leader::Leader(const RankView& view) : view_(view), block_(view.control(0)) {
  seen_slots_.resize(view_.chunks.size());
  for (auto& slots : seen_slots_) slots.fill(0);
}

bool Leader::Match(Failure* failure) {
  const size_t ranks = view_.chunks.size();
  bool found = false;
  for (size_t r = 0; r < ranks; ++r) {
    ControlBlock& block = view_.control(static_cast<int32_t>(r));
    const uint32_t used = std::min<uint32_t>(block.slots_used.load(), ControlBlock::kSlots);
    for (uint32_t i = 0; i < used; ++i) {
      const uint64_t order = block.posts[i].order.load();
      if (order == 0 || order == seen_slots_[r][i]) continue;
      seen_slots_[r][i] = order;
      auto& queues = unmatched_[block.posts[i].key.Get()];
      queues.resize(ranks);
      const Seen seen{order, block.posts[i].signature.load(std::memory_order_relaxed),
                      block.posts[i].launch.load(std::memory_order_relaxed)};
      auto at = std::upper_bound(queues[r].begin(), queues[r].end(), seen,
                                 [](const Seen& a, const Seen& b) { return a.order < b.order; });
      queues[r].insert(at, seen);
      found = true;
    }
  }
  if (unmatched_.empty()) return false;
  uint64_t slowest = UINT64_MAX;
  for (size_t r = 0; r < ranks; ++r) {
    slowest = std::min(slowest, view_.control(static_cast<int32_t>(r)).executed.load());
  }
  uint64_t head = block_.log_head.load();
  bool appended = false;
  for (auto it = unmatched_.begin(); it != unmatched_.end();) {
    auto& queues = it->second;
    std::vector<Seen> picked;
    while (head - slowest < ControlBlock::kLog && PickCalls(queues, &picked)) {
      std::vector<int32_t> other;
      for (size_t r = 0; r < ranks; ++r) {
        if (picked[r].signature != picked[0].signature) other.push_back(static_cast<int32_t>(r));
      }
      if (!other.empty()) {
        *failure = {Failure::kInvalid,
                    std::string(KindName(static_cast<int64_t>(it->first.kind))) +
                        ": ranks disagree about shapes or dtypes; got other ones " + "on ranks " + List(other) +
                        " than on rank 0 of " + view_.group + " (" + Describe(it->first) +
                        "), expected the same static shapes on all ranks; pad the batch or use ids of -1"};
        return true;
      }
      LogEntry& entry = block_.log[head % ControlBlock::kLog];
      entry.key.Set(it->first);
      entry.launch.store(picked[0].launch, std::memory_order_relaxed);
      block_.log_head.store(++head);
      appended = true;
    }
    const bool empty = std::all_of(queues.begin(), queues.end(), [](const std::deque<Seen>& q) { return q.empty(); });
    it = empty ? unmatched_.erase(it) : std::next(it);
  }
  if (appended) {
    for (size_t r = 0; r < ranks; ++r) view_.control(static_cast<int32_t>(r)).bell.Ring();
  }
  return found || appended;
}

// Takes one call of each rank, if all ranks have one of the same launch. XLA numbers a program's launches alike on all
// devices and processes, so launches that nobody waits for, or that processes start in another order, are never mixed.
bool Leader::PickCalls(std::vector<std::deque<Seen>>& queues, std::vector<Seen>* picked) {
  for (const Seen& first : queues[0]) {
    const uint64_t launch = first.launch;
    auto find = [launch](std::deque<Seen>& queue) {
      return std::find_if(queue.begin(), queue.end(), [launch](const Seen& s) { return s.launch == launch; });
    };
    if (!std::all_of(queues.begin(), queues.end(), [&](std::deque<Seen>& q) { return find(q) != q.end(); })) continue;
    picked->clear();
    for (auto& queue : queues) {
      auto at = find(queue);
      picked->push_back(*at);
      queue.erase(at);
    }
    return true;
  }
  return false;
}

}  // namespace moonep

#include "xla_ffi/cpu/leader.h"

#include <algorithm>

namespace moonep {

Leader::Leader(const RankView& view) : view_(view), block_(view.control(0)), seen_(view.chunks.size()) {
  for (auto& slots : seen_) slots.fill(0);
}

bool Leader::Match() {
  const int32_t ranks = view_.shape.ranks;
  bool found = false;
  for (int32_t r = 0; r < ranks; ++r) {
    ControlBlock& block = view_.control(r);
    const uint32_t used = std::min<uint32_t>(block.slots_used.load(), ControlBlock::kSlots);
    for (uint32_t i = 0; i < used; ++i) {
      const uint64_t order = block.posts[i].order.load();
      uint64_t& seen = seen_[static_cast<size_t>(r)][i];
      if (order == 0 || order == seen) continue;
      seen = order;
      ++posted_by_[block.posts[i].key.Get()];
      found = true;
    }
  }
  if (posted_by_.empty()) return false;
  uint64_t slowest = UINT64_MAX;
  for (int32_t r = 0; r < ranks; ++r) slowest = std::min(slowest, view_.control(r).executed.load());
  uint64_t head = block_.log_head.load();
  bool appended = false;
  for (auto it = posted_by_.begin(); it != posted_by_.end() && head - slowest < ControlBlock::kLog;) {
    if (it->second < ranks) {
      ++it;
      continue;
    }
    block_.log[head % ControlBlock::kLog].key.Set(it->first);
    block_.log_head.store(++head);
    appended = true;
    it = posted_by_.erase(it);
  }
  if (appended) {
    for (int32_t r = 0; r < ranks; ++r) view_.control(r).bell.Ring();
  }
  return found || appended;
}

}  // namespace moonep

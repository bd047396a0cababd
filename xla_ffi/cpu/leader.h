// The leader of a group (rank 0) decides the order: it appends a call to the log once every rank has posted it.
//
// Runs on rank 0's progress thread.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <vector>

#include "xla_ffi/cpu/call.h"

namespace moonep {

class Leader {
 public:
  // The view must outlive the leader.
  explicit Leader(const RankView& view);

  // Takes in new posts and appends what is complete. Returns whether anything changed.
  bool Match();

 private:
  const RankView& view_;
  ControlBlock& block_;
  std::vector<std::array<uint64_t, ControlBlock::kSlots>> seen_;  // [ranks] order of the post last seen in each slot
  std::map<CallKey, int32_t> posted_by_;  // how many ranks have posted a call; a rank has one of a key at a time
};

}  // namespace moonep

// The leader of a group (rank 0) decides the order: it appends a call to the log once every rank has posted it.
//
// Runs on rank 0's progress thread. Calls of one key match within one launch of the program, first in, first out.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <map>
#include <vector>

#include "xla_ffi/cpu/call.h"

namespace moonep {

class Leader {
 public:
  // The view must outlive the leader.
  explicit Leader(const RankView& view);

  // Takes in new posts and appends what is complete. Returns whether anything changed; *failure says if ranks disagree.
  bool Match(Failure* failure);

 private:
  // A post that waits for its like on other ranks.
  struct Seen {
    uint64_t order = 0;
    uint64_t signature = 0;
    uint64_t launch = 0;
  };

  bool PickCalls(std::vector<std::deque<Seen>>& queues, std::vector<Seen>* picked);

  const RankView& view_;
  ControlBlock& block_;
  std::vector<std::array<uint64_t, ControlBlock::kSlots>> seen_slots_;  // [ranks] order of the post last seen
  std::map<CallKey, std::vector<std::deque<Seen>>> unmatched_;          // [ranks] queues
};

}  // namespace moonep

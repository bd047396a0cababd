// What a progress thread needs to know of a call: its key, and how to move its data. Free of XLA.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "xla_ffi/common/operands.h"
#include "xla_ffi/core/layout.h"
#include "xla_ffi/cpu/control.h"

namespace moonep {

inline std::string Describe(const CallKey& key) {
  return "ticket " + std::to_string(key.ticket) + ", channel " + std::to_string(key.channel) + ", site " +
         std::to_string(key.site & 0xffffffffu);
}

// Parts of the chunks that calls of different kinds may use at the same time.
enum class Region { kIds, kRows, kReturns, kSlots };
constexpr int kRegions = 4;

struct Failure {
  enum Code : uint32_t { kNone = 0, kInvalid = 1, kDeadline = 2, kInternal = 3, kClosed = 4 };
  Code code = kNone;
  std::string text;
  explicit operator bool() const { return code != kNone; }
};

// One local rank's place in its group, with every member's chunk mapped.
struct RankView {
  DomainShape shape;
  ChunkLayout layout;
  int32_t rank = 0;
  bool poison = false;              // fill outputs and own staging with NaN bytes before use (tests)
  std::vector<std::byte*> chunks;   // [ranks]
  std::vector<std::string> labels;  // [ranks] "rank 2 (process 1)", for messages
  std::string group;                // "group 0 of domain 3", for messages

  ControlBlock& control(int32_t r) const { return *reinterpret_cast<ControlBlock*>(chunks[static_cast<size_t>(r)]); }
  std::byte* own() const { return chunks[static_cast<size_t>(rank)]; }
};

// What a call moved over rank borders, and what a plan decided for this rank (see Counters).
struct Traffic {
  int64_t bytes = 0;
  int64_t rows = 0;
  int64_t link_rows = 0;
  int64_t moved_experts = 0;
};

// A call moves its data in rounds of: copy in, all in, copy out, all out. Both copies run on the rank's progress
// thread; each returns what is wrong, or an empty string.
class Call {
 public:
  virtual ~Call() = default;
  virtual Region region() const = 0;
  // Known alike on all ranks once they hold the operands; 0: nothing crosses between ranks.
  virtual int64_t Rounds(const RankView&) { return 1; }
  virtual std::string CopyIn(const RankView& rank, int64_t round) = 0;
  virtual std::string CopyOut(const RankView& rank, int64_t round) = 0;
  // The local part that needs no other rank; runs before the first round.
  virtual std::string Begin(const RankView&, uint64_t /*entry*/) { return ""; }
  // Fills float outputs with NaN and integer outputs with safe values. `before` the call, results that share their
  // buffer with an operand are left alone.
  virtual void Poison(bool before) = 0;

  CallKey key;
  Traffic traffic;  // added up by the copies
  std::function<void(const Failure&)> done;
};

}  // namespace moonep

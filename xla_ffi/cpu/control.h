// The control block at the start of every rank's shared chunk: what ranks tell each other, and how they sleep.
//
// Zero-filled memory is a valid block. Each word has one writer (named below) unless it says otherwise. All cross-rank
// order is by seq_cst atomics: correctness over a few nanoseconds, on a path that sleeps in the kernel anyway.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstddef>
#include <cstdint>
#include <tuple>

namespace moonep {

inline int64_t NowNs() {
  timespec t{};
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<int64_t>(t.tv_sec) * 1000000000 + t.tv_nsec;
}

// Lets one thread sleep until any other thread, of any process, has something for it.
class Doorbell {
 public:
  uint32_t Snapshot() const { return rings_.load(); }

  // Returns at once if the bell was rung after `snapshot` was taken.
  void Wait(uint32_t snapshot, int64_t timeout_ns) {
    sleeping_.store(1);
    if (rings_.load() == snapshot && timeout_ns > 0) {
      const timespec limit{static_cast<time_t>(timeout_ns / 1000000000), static_cast<long>(timeout_ns % 1000000000)};
      syscall(SYS_futex, reinterpret_cast<uint32_t*>(&rings_), FUTEX_WAIT, snapshot, &limit, nullptr, 0);
    }
    sleeping_.store(0);
  }

  void Ring() {
    rings_.fetch_add(1);
    if (sleeping_.load() != 0) {
      syscall(SYS_futex, reinterpret_cast<uint32_t*>(&rings_), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
    }
  }

 private:
  std::atomic<uint32_t> rings_;     // written by all
  std::atomic<uint32_t> sleeping_;  // written by the owner
};
static_assert(std::atomic<uint32_t>::is_always_lock_free && sizeof(std::atomic<uint32_t>) == 4);

// What a call is: equal on all ranks for calls that belong together (docs/design.md: "Calls match by what they are").
struct CallKey {
  uint64_t kind = 0;
  uint64_t channel = 0;
  uint64_t site = 0;
  uint64_t ticket = 0;  // of the plan used; 0 for a plan call
  uint64_t launch = 0;  // of the program: XLA numbers launches alike on all devices and processes

  // The same place in a program, whatever the launch.
  bool SamePlace(const CallKey& o) const {
    return kind == o.kind && channel == o.channel && site == o.site && ticket == o.ticket;
  }
  bool operator==(const CallKey& o) const { return SamePlace(o) && launch == o.launch; }
  bool operator<(const CallKey& o) const {
    return std::tie(kind, channel, site, ticket, launch) < std::tie(o.kind, o.channel, o.site, o.ticket, o.launch);
  }
};

// A CallKey in shared memory. The words are atomics because a rank that names missing peers may read while the owner
// fills the slot anew.
struct SharedKey {
  std::atomic<uint64_t> words[5];

  void Set(const CallKey& k) {
    const uint64_t values[5] = {k.kind, k.channel, k.site, k.ticket, k.launch};
    for (int i = 0; i < 5; ++i) words[i].store(values[i], std::memory_order_relaxed);
  }
  CallKey Get() const {
    uint64_t values[5];
    for (int i = 0; i < 5; ++i) values[i] = words[i].load(std::memory_order_relaxed);
    return {values[0], values[1], values[2], values[3], values[4]};
  }
};

// A call that its rank has posted and that is not yet executed.
struct alignas(64) PostSlot {
  std::atomic<uint64_t> order;  // 0: free; else 1 + the rank's count of posts, written last
  SharedKey key;
};

struct alignas(64) LogEntry {
  SharedKey key;
};

struct ControlBlock {
  static constexpr int kSlots = 512;  // calls in flight per rank; more wait in the rank's process
  static constexpr int kLog = 1024;   // entries that ranks may lag behind the leader
  static constexpr int kText = 3072;  // bytes of an error text

  // Written by the owner.
  alignas(64) std::atomic<uint64_t> steps;       // synchronisation points passed
  alignas(64) std::atomic<uint64_t> executed;    // log entries executed
  alignas(64) std::atomic<uint32_t> slots_used;  // slots at or above this one were never used
  std::atomic<uint32_t> error_code;
  std::atomic<uint32_t> closed;  // the owner has stopped: it answers no call any more
  char error_text[kText];        // written before origin points here
  PostSlot posts[kSlots];

  // Written by the leader (rank 0), in its own block.
  alignas(64) std::atomic<uint64_t> log_head;  // entries appended so far
  LogEntry log[kLog];

  // Written by all: in the leader's block, 1 + the rank whose error came first (compare and swap from 0).
  alignas(64) std::atomic<uint32_t> origin;

  // Rung by all, waited for by the owner.
  alignas(64) Doorbell bell;
};

}  // namespace moonep

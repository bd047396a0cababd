// A rank's symmetric memory on a GPU: control block, then the parts. Host and device; knows no XLA.
#pragma once

#include <cstddef>
#include <cstdint>

#include "xla_ffi/common/counters.h"
#include "xla_ffi/core/layout.h"

namespace moonep {

constexpr int kMaxRanks = 128;
constexpr int kMaxExperts = 1024;
constexpr int kMaxTopk = 64;  // bits of a token's mask

// Parts of the chunk whose uses follow each other in stream order; each has sync words of its own.
enum class Part : int32_t { kIds = 0, kRows = 1, kReturns = 2, kSlots = 3 };
constexpr int kParts = 4;

// Why a rank gave up; what the host turns into text.
struct ErrorRecord {
  // kClosed and kReported come from the host: of no call, until a peer meets it in one.
  enum Code : uint32_t { kNone = 0, kTimeout = 1, kMismatch = 2, kBusy = 3, kClosed = 4, kReported = 5, kPoisoned = 6 };
  uint32_t code;
  int32_t kind;  // -1: of no call
  int32_t ticket;
  int32_t rank;         // that saw it
  uint64_t missing[2];  // bit r: rank r did not come (and will not), or came with another call (kMismatch)
  uint64_t waited_ns;
};

// One word per line, so that no two writers share one. Zeroed before any peer maps the chunk.
struct alignas(128) SyncWord {
  uint64_t value;  // epoch << 32 | tag, single-copy atomic
};

struct ControlBlockGpu {
  // Written by peers, by their rank.
  SyncWord arrived[kParts][kMaxRanks];   // the peer's data for this epoch is here
  SyncWord consumed[kParts][kMaxRanks];  // the peer has copied out what I sent in this epoch
  SyncWord error[kMaxRanks];             // nonzero: 1 + the rank whose record says what went wrong first
  // Written by the owner.
  alignas(128) ErrorRecord record;
  struct alignas(128) PartState {
    uint32_t epoch;   // of the round being executed, or of the last one
    uint32_t tag;     // hash of its kind, site and ticket
    uint32_t site;    // hash of its kind and site: the same whatever the plan
    uint32_t live;    // 0: the call failed; its kernels touch no peer and poison its outputs
    uint32_t busy;    // a call is between its first and its last kernel
    uint32_t blocks;  // blocks of the running kernel that are done
    int32_t kind;
    int32_t ticket;
  } part[kParts];
  uint64_t limit_ns;
  uint64_t first_limit_ns;
  alignas(128) Counters counters;  // added to by single threads that wait for no answer; read by the host
  uint32_t seen[1024];             // hashes of sites that were called before: their limit is the short one
};

// The planner works on tiles of a rank's ids: whole tokens, a block's worth of ids, a multiple of 8 ids.
constexpr int kTileIds = 2048;
MOONEP_HD constexpr int64_t PlanTile(const DomainShape& d) {
  return static_cast<int64_t>(kTileIds / d.topk / 8 * 8) * d.topk;
}
MOONEP_HD constexpr int64_t PlanTiles(const DomainShape& d, int64_t tokens) {
  return (tokens * d.topk + PlanTile(d) - 1) / PlanTile(d);
}

struct ChunkLayoutGpu {
  int64_t row_stride = 0;      // bytes
  int64_t ids_stride = 0;      // uint16 elements from source to source
  int64_t tiles_stride = 0;    // the same for tile_counts
  int64_t ids = 0;             // [2, ranks, tokens*topk] uint16 by parity of the epoch, source
  int64_t tile_counts = 0;     // [2, ranks, tiles, experts] uint16: ids of a tile that name an expert
  int64_t counts = 0;          // [2, ranks, experts] int32: the same over all tiles
  int64_t rows = 0;            // [recv_rows(tokens)] rows, written by sources
  int64_t weights = 0;         // [recv_rows(tokens)] float32
  int64_t returns = 0;         // [tokens*topk] rows, written by the ranks that computed them
  int64_t return_weights = 0;  // [tokens*topk] float32
  int64_t slots = 0;           // stage_bytes
  int64_t bytes = 0;

  static ChunkLayoutGpu Of(const DomainShape& d) {
    ChunkLayoutGpu l;
    const int64_t assignments = static_cast<int64_t>(d.tokens) * d.topk;
    const int64_t rows = d.recv_rows(d.tokens);
    l.row_stride = AlignUp(d.row_bytes, 128);
    l.ids_stride = AlignUp(assignments, 8);
    l.tiles_stride = PlanTiles(d, d.tokens) * d.experts;
    int64_t at = static_cast<int64_t>(sizeof(ControlBlockGpu));
    auto part = [&at](int64_t bytes) {
      at = AlignUp(at, 4096);
      const int64_t start = at;
      at += bytes;
      return start;
    };
    l.ids = part(2 * d.ranks * l.ids_stride * 2);
    l.tile_counts = part(2 * d.ranks * l.tiles_stride * 2);
    l.counts = part(int64_t{2} * d.ranks * d.experts * 4);
    l.rows = part(rows * l.row_stride);
    l.weights = part(rows * 4);
    l.returns = part(assignments * l.row_stride);
    l.return_weights = part(assignments * 4);
    l.slots = part(d.stage_bytes);
    l.bytes = AlignUp(at, 4096);
    return l;
  }
};

// One local rank as its kernels see it; passed by value, so it holds nothing that changes between launches.
struct RankViewGpu {
  DomainShape shape;
  ChunkLayoutGpu layout;
  int32_t rank;
  ErrorRecord* host_record;  // pinned host memory, mapped: code is written last
  std::byte* chunk[kMaxRanks];

  MOONEP_HD ControlBlockGpu& control(int32_t r) const { return *reinterpret_cast<ControlBlockGpu*>(chunk[r]); }
  MOONEP_HD ControlBlockGpu& own() const { return control(rank); }
  MOONEP_HD std::byte* row(int32_t r, int64_t i) const { return chunk[r] + layout.rows + i * layout.row_stride; }
  MOONEP_HD std::byte* return_row(int32_t r, int64_t i) const {
    return chunk[r] + layout.returns + i * layout.row_stride;
  }
  MOONEP_HD float* weights(int32_t r) const { return reinterpret_cast<float*>(chunk[r] + layout.weights); }
  MOONEP_HD float* return_weights(int32_t r) const {
    return reinterpret_cast<float*>(chunk[r] + layout.return_weights);
  }
  MOONEP_HD uint16_t* ids(int32_t r, uint32_t parity, int32_t source) const {
    return reinterpret_cast<uint16_t*>(chunk[r] + layout.ids) + (parity * shape.ranks + source) * layout.ids_stride;
  }
  MOONEP_HD uint16_t* tile_counts(int32_t r, uint32_t parity, int32_t source) const {
    return reinterpret_cast<uint16_t*>(chunk[r] + layout.tile_counts) +
           (parity * shape.ranks + source) * layout.tiles_stride;
  }
  MOONEP_HD int32_t* counts(int32_t r, uint32_t parity, int32_t source) const {
    return reinterpret_cast<int32_t*>(chunk[r] + layout.counts) +
           static_cast<int64_t>(parity * shape.ranks + source) * shape.experts;
  }
};

// What identifies a call: equal on all ranks for calls that belong together.
struct CallId {
  int32_t kind;
  uint32_t site_hash;     // of kind, channel and site
  const int32_t* ticket;  // device; null for a plan, whose ticket is its epoch
  uint32_t counts;        // 1; 0 in later rounds of weights, which begin again and are the same call
};

}  // namespace moonep

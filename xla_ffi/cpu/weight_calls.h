// prefetch and reduce_grad on shared memory, in rounds that fit the stage.
//
// A round moves the same window of bytes of every expert that crosses between ranks, so all replicas of an expert meet
// in one round and their gradients sum in float32 with one rounding, whatever the stage's size.
#pragma once

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "xla_ffi/cpu/row_calls.h"

namespace moonep {

class WeightCall : public Call {
 public:
  explicit WeightCall(CallArgs a) : a_(std::move(a)) {
    for (size_t i = 0; i < a_.rets.size(); ++i) {
      const Array& ret = a_.rets[i];
      leaf_bytes_.push_back(ret.bytes() / std::max<int64_t>(ret.dims[0], 1));
      leaf_start_.push_back(expert_bytes_);
      expert_bytes_ += AlignUp(leaf_bytes_.back(), kAlign);
    }
  }

  Region region() const override { return Region::kSlots; }

  int64_t Rounds(const RankView& v) override {
    const int32_t* slots = a_.args[0].i32();
    const bool none = std::all_of(slots, slots + v.shape.experts, [](int32_t e) { return e < 0; });
    window_ = v.shape.stage_bytes / v.shape.epn() / kAlign * kAlign;
    return none ? 0 : (expert_bytes_ + window_ - 1) / window_;
  }

  void Poison(bool before) override {
    for (size_t i = 0; i < a_.rets.size(); ++i) {
      if (!before || a_.rets[i].data != a_.args[i + 2].data) FillNaN(a_.rets[i]);
    }
  }

 protected:
  static constexpr int64_t kAlign = 64;  // no window splits an element

  // A piece of one expert's leaf that lies in a round's window.
  struct Piece {
    size_t leaf;
    int64_t offset;  // bytes into the leaf's part of the expert
    int64_t stage;   // bytes into the slot's part of the stage
    int64_t bytes;
  };
  std::vector<Piece> Pieces(int64_t round) const {
    std::vector<Piece> pieces;
    const int64_t begin = round * window_;
    const int64_t end = begin + window_;
    for (size_t i = 0; i < leaf_bytes_.size(); ++i) {
      const int64_t from = std::max(begin, leaf_start_[i]);
      const int64_t to = std::min(end, leaf_start_[i] + leaf_bytes_[i]);
      if (from < to) pieces.push_back({i, from - leaf_start_[i], from - begin, to - from});
    }
    return pieces;
  }

  std::byte* Stage(const RankView& v, int32_t rank, int64_t slot) const {
    return v.chunks[static_cast<size_t>(rank)] + v.layout.slots + slot * window_;
  }
  int32_t SlotExpert(const RankView& v, int32_t rank, int32_t slot) const {
    return a_.args[0].i32()[rank * v.shape.epn() + slot];
  }
  // Of each of this rank's experts, whether some rank holds a replica of it.
  std::vector<bool> Replicated(const RankView& v) const {
    const int32_t epn = v.shape.epn();
    const int32_t* slots = a_.args[0].i32();
    std::vector<bool> replicated(static_cast<size_t>(epn), false);
    for (int32_t i = 0; i < v.shape.experts; ++i) {
      if (slots[i] >= 0 && v.shape.home_of(slots[i]) == v.rank) replicated[static_cast<size_t>(slots[i] % epn)] = true;
    }
    return replicated;
  }
  std::byte* In(size_t leaf, int64_t expert) const { return a_.args[leaf + 2].raw() + expert * leaf_bytes_[leaf]; }
  std::byte* Out(size_t leaf, int64_t expert) const { return a_.rets[leaf].raw() + expert * leaf_bytes_[leaf]; }

  std::string CheckSlots(const RankView& v) const {
    for (int32_t i = 0; i < v.shape.experts; ++i) {
      const int32_t e = a_.args[0].i32()[i];
      if (e < -1 || e >= v.shape.experts) return Corrupt(a_.kind, "slot_expert");
    }
    return "";
  }

  CallArgs a_;
  std::vector<int64_t> leaf_bytes_;  // of one expert
  std::vector<int64_t> leaf_start_;  // in the expert's run of leaves
  int64_t expert_bytes_ = 0;
  int64_t window_ = 0;
};

class PrefetchCall final : public WeightCall {
 public:
  using WeightCall::WeightCall;

  std::string Begin(const RankView& v, uint64_t) override {
    if (std::string wrong = CheckSlots(v); !wrong.empty()) return wrong;
    const int32_t epn = v.shape.epn();
    for (size_t leaf = 0; leaf < leaf_bytes_.size(); ++leaf) {
      if (In(leaf, 0) == Out(leaf, 0)) continue;  // [2*epn] in place: own experts are there, unused slots stay
      const int64_t rows = a_.args[leaf + 2].dims[0];
      std::memcpy(Out(leaf, 0), In(leaf, 0), static_cast<size_t>(rows * leaf_bytes_[leaf]));
      for (int32_t slot = 0; rows == epn && slot < epn; ++slot) {
        if (SlotExpert(v, v.rank, slot) >= 0) continue;
        std::memset(Out(leaf, epn + slot), 0, static_cast<size_t>(leaf_bytes_[leaf]));
      }
    }
    return "";
  }

  std::string CopyIn(const RankView& v, int64_t round) override {
    const int32_t epn = v.shape.epn();
    const std::vector<bool> wanted = Replicated(v);
    for (const Piece& p : Pieces(round)) {
      for (int32_t e = 0; e < epn; ++e) {
        if (!wanted[static_cast<size_t>(e)]) continue;
        std::memcpy(Stage(v, v.rank, e) + p.stage, In(p.leaf, e) + p.offset, static_cast<size_t>(p.bytes));
      }
    }
    return "";
  }

  std::string CopyOut(const RankView& v, int64_t round) override {
    const int32_t epn = v.shape.epn();
    for (const Piece& p : Pieces(round)) {
      for (int32_t slot = 0; slot < epn; ++slot) {
        const int32_t e = SlotExpert(v, v.rank, slot);
        if (e < 0) continue;
        std::memcpy(Out(p.leaf, epn + slot) + p.offset, Stage(v, v.shape.home_of(e), e % epn) + p.stage,
                    static_cast<size_t>(p.bytes));
        traffic.bytes += p.bytes;
      }
    }
    return "";
  }
};

class ReduceGradCall final : public WeightCall {
 public:
  using WeightCall::WeightCall;

  std::string Begin(const RankView& v, uint64_t) override {
    if (std::string wrong = CheckSlots(v); !wrong.empty()) return wrong;
    const std::vector<bool> replicated = Replicated(v);
    for (size_t leaf = 0; leaf < leaf_bytes_.size(); ++leaf) {
      if (In(leaf, 0) == Out(leaf, 0)) continue;
      const int64_t rows = std::min(a_.args[leaf + 2].dims[0], a_.rets[leaf].dims[0]);
      for (int64_t row = 0; row < rows; ++row) {
        if (row < v.shape.epn() && replicated[static_cast<size_t>(row)])
          continue;  // its sum is written once, by CopyOut
        std::memcpy(Out(leaf, row), In(leaf, row), static_cast<size_t>(leaf_bytes_[leaf]));
      }
    }
    return "";
  }

  std::string CopyIn(const RankView& v, int64_t round) override {
    const int32_t epn = v.shape.epn();
    for (const Piece& p : Pieces(round)) {
      const bool full = a_.rets[p.leaf].dims[0] != epn;
      for (int32_t slot = 0; slot < epn; ++slot) {
        if (SlotExpert(v, v.rank, slot) < 0) continue;
        const size_t bytes = static_cast<size_t>(p.bytes);
        std::memcpy(Stage(v, v.rank, slot) + p.stage, In(p.leaf, epn + slot) + p.offset, bytes);
        // prefetch overwrote this row of its [2*epn] operand, so the operand's gradient there is zero.
        if (full) std::memset(Out(p.leaf, epn + slot) + p.offset, 0, bytes);
      }
    }
    return "";
  }

  std::string CopyOut(const RankView& v, int64_t round) override {
    const int32_t epn = v.shape.epn();
    std::vector<Term> terms;
    for (const Piece& p : Pieces(round)) {
      const Array& leaf = a_.rets[p.leaf];
      for (int32_t e = 0; e < epn; ++e) {
        terms.assign(1, {In(p.leaf, e) + p.offset, 1.0f});
        for (int32_t r = 0; r < v.shape.ranks; ++r) {
          for (int32_t slot = 0; slot < epn; ++slot) {
            if (SlotExpert(v, r, slot) != v.rank * epn + e) continue;
            terms.push_back({Stage(v, r, slot) + p.stage, 1.0f});
          }
        }
        if (terms.size() == 1) continue;
        traffic.bytes += static_cast<int64_t>(terms.size() - 1) * p.bytes;
        SumRows(leaf.type, Out(p.leaf, e) + p.offset, terms.data(), static_cast<int64_t>(terms.size()),
                p.bytes / leaf.item_bytes);
      }
    }
    return "";
  }
};

}  // namespace moonep

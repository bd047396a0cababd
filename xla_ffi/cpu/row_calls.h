// plan, dispatch and combine (with their backward uses) on shared memory.
//
// dispatch: a source stages its rows once in its own chunk, and each destination expands them from there. combine: the
// rank that computed the rows sums those of one token and writes the result into the source's chunk.
#pragma once

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "xla_ffi/common/operands.h"
#include "xla_ffi/cpu/call.h"
#include "xla_ffi/cpu/plan_rows.h"
#include "xla_ffi/cpu/sum_rows.h"

namespace moonep {

inline void FillNaN(const Array& a) {
  // All bits set is a NaN in every float type.
  std::memset(a.data, 0xff, static_cast<size_t>(a.bytes()));
}

inline std::string Corrupt(Kind kind, const char* what) {
  return std::string(KindName(static_cast<int64_t>(kind))) + ": the plan does not fit this call; got " + what +
         " out of range, expected a Plan made by this domain for the same batch; pass d.plan unchanged";
}

// A call whose rows go by a plan.
class RowCall : public Call {
 public:
  RowCall(CallArgs a, int64_t s) : a_(std::move(a)), s_(s) {}

  void Poison(bool) override {
    for (const Array& ret : a_.rets) FillNaN(ret);
  }

 protected:
  static std::byte* RowAt(const RankView& v, int32_t rank, int64_t part, int64_t row) {
    return v.chunks[static_cast<size_t>(rank)] + part + row * v.layout.row_stride;
  }
  static float* FloatsAt(const RankView& v, int32_t rank, int64_t part) {
    return reinterpret_cast<float*>(v.chunks[static_cast<size_t>(rank)] + part);
  }

  CallArgs a_;
  int64_t s_;
};

class PlanCall final : public RowCall {
 public:
  using RowCall::RowCall;
  Region region() const override { return Region::kIds; }

  std::string Begin(const RankView&, uint64_t entry) override {
    ticket_ = static_cast<int32_t>(entry & 0x7fffffff);
    return "";
  }

  std::string CopyIn(const RankView& v, int64_t) override {
    const int32_t* ids = a_.args[0].i32();
    const int64_t n = s_ * v.shape.topk;
    std::memcpy(v.own() + v.layout.ids, ids, static_cast<size_t>(n) * 4);
    CountIds(v.shape, ids, n, reinterpret_cast<int32_t*>(v.own() + v.layout.counts));
    return "";
  }

  std::string CopyOut(const RankView& v, int64_t) override {
    PlanInputs in;
    for (std::byte* chunk : v.chunks) {
      in.ids.push_back(reinterpret_cast<const int32_t*>(chunk + v.layout.ids));
      in.counts.push_back(reinterpret_cast<const int32_t*>(chunk + v.layout.counts));
    }
    const PlanArrays out = Outputs();
    HostTables tables(v.shape, in);
    tables.Groups(v.rank, out);
    PlaceSource(v.shape, tables.tables(), v.rank, a_.args[0].i32(), s_ * v.shape.topk, out);
    PlaceHosted(v.shape, tables.tables(), v.rank, in, s_, out);
    a_.rets[10].i32()[0] = ticket_;
    CountPlan(v, out);
    return "";
  }

  // Safe for whoever uses it: no rows anywhere, and a ticket that every op refuses.
  void Poison(bool) override {
    for (size_t i = 0; i < a_.rets.size(); ++i) {
      const bool sizes = i == 5 || i == 6 || i == 8 || i == 9;
      std::fill_n(a_.rets[i].i32(), a_.rets[i].elements(), sizes ? 0 : -1);
    }
  }

 private:
  void CountPlan(const RankView& v, const PlanArrays& out) {
    const int64_t per_rank = s_ * v.shape.topk;
    traffic.bytes += (v.shape.ranks - 1) * (per_rank + v.shape.experts) * 4;
    traffic.rows += out.rank_rows[v.rank];
    for (int64_t row = 0; row < a_.rets[2].dims[0]; ++row) {
      if (out.src[row] >= 0 && out.primary[row] == row && out.src[row] / per_rank != v.rank) ++traffic.link_rows;
    }
    const int32_t epn = v.shape.epn();
    for (int32_t slot = 0; slot < epn; ++slot) {
      if (out.slot_expert[v.rank * epn + slot] >= 0) ++traffic.moved_experts;
    }
  }

  PlanArrays Outputs() const {
    const auto& r = a_.rets;
    return {r[0].i32(), r[1].i32(), r[2].i32(), r[3].i32(), r[4].i32(),
            r[5].i32(), r[6].i32(), r[7].i32(), r[8].i32(), r[9].i32()};
  }

  int32_t ticket_ = -1;
};

class DispatchCall final : public RowCall {
 public:
  using RowCall::RowCall;
  Region region() const override { return Region::kRows; }

  std::string CopyIn(const RankView& v, int64_t) override {
    const std::byte* x = a_.args[6].raw();
    if (v.layout.row_stride == v.shape.row_bytes) {
      std::memcpy(RowAt(v, v.rank, v.layout.rows, 0), x, static_cast<size_t>(s_ * v.shape.row_bytes));
    } else {
      for (int64_t t = 0; t < s_; ++t) {
        std::memcpy(RowAt(v, v.rank, v.layout.rows, t), x + t * v.shape.row_bytes,
                    static_cast<size_t>(v.shape.row_bytes));
      }
    }
    if (weighted()) {
      std::memcpy(FloatsAt(v, v.rank, v.layout.weights), a_.args[7].data, static_cast<size_t>(a_.args[7].bytes()));
    }
    return "";
  }

  std::string CopyOut(const RankView& v, int64_t) override {
    const int32_t* src = a_.args[2].i32();
    const int32_t* primary = a_.args[3].i32();
    std::byte* hidden = a_.rets[0].raw();
    const int64_t per_rank = s_ * v.shape.topk;
    const size_t bytes = static_cast<size_t>(v.shape.row_bytes);
    for (int64_t row = 0; row < a_.rets[0].dims[0]; ++row, hidden += bytes) {
      const int64_t id = src[row];
      if (id < 0) {
        std::memset(hidden, 0, bytes);
        if (weighted()) a_.rets[1].f32()[row] = 0.0f;
        continue;
      }
      if (id >= per_rank * v.shape.ranks) return Corrupt(a_.kind, "src");
      const int32_t rank = static_cast<int32_t>(id / per_rank);
      const int64_t assignment = id % per_rank;
      std::memcpy(hidden, RowAt(v, rank, v.layout.rows, assignment / v.shape.topk), bytes);
      if (weighted()) a_.rets[1].f32()[row] = FloatsAt(v, rank, v.layout.weights)[assignment];
      // A token's other rows here are copies of its first one.
      if (rank != v.rank) traffic.bytes += (primary[row] == row ? v.shape.row_bytes : 0) + (weighted() ? 4 : 0);
    }
    return "";
  }

 private:
  bool weighted() const { return a_.kind == Kind::kDispatch; }
};

// combine: w scales each row, and y sums. dispatch_grad: rows sum unscaled to dx, and each row's w goes home.
class CombineCall final : public RowCall {
 public:
  using RowCall::RowCall;
  Region region() const override { return Region::kReturns; }

  std::string CopyIn(const RankView& v, int64_t) override {
    const int32_t* src = a_.args[1].i32();
    const int32_t* primary = a_.args[2].i32();
    const int32_t* next = a_.args[3].i32();
    const float* w = a_.args[6].f32();
    const int64_t rows = a_.args[5].dims[0];
    const int64_t per_rank = s_ * v.shape.topk;
    const bool exact = v.shape.exact;
    const size_t bytes = static_cast<size_t>(v.shape.row_bytes);
    std::vector<Term> terms;
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t id = src[row];
      if (id < 0) continue;
      if (id >= per_rank * v.shape.ranks) return Corrupt(a_.kind, "src");
      if (primary[row] < 0 || primary[row] >= rows || next[row] < -1 || next[row] >= rows) {
        return Corrupt(a_.kind, "primary or next");
      }
      const int32_t rank = static_cast<int32_t>(id / per_rank);
      const int64_t assignment = id % per_rank;
      // exact: the source scales and sums in float32, so each row travels as it is, its weight beside it.
      const bool with_weight = returns_weights() || exact;
      if (with_weight) FloatsAt(v, rank, v.layout.return_weights)[assignment] = w[row];
      if (rank != v.rank && with_weight) traffic.bytes += 4;
      if (!exact && primary[row] != row) continue;
      if (rank != v.rank) traffic.bytes += v.shape.row_bytes;
      std::byte* to = RowAt(v, rank, v.layout.returns, assignment);
      if (exact || (next[row] < 0 && scale(row) == 1.0f)) {
        std::memcpy(to, Out(row, bytes), bytes);
        continue;
      }
      terms.clear();
      // A corrupt chain may be a cycle.
      for (int64_t n = row; n >= 0 && n < rows && static_cast<int64_t>(terms.size()) <= v.shape.topk; n = next[n]) {
        terms.push_back({Out(n, bytes), scale(n)});
      }
      SumRows(a_.args[5].type, to, terms.data(), static_cast<int64_t>(terms.size()), v.shape.hidden);
    }
    return "";
  }

  std::string CopyOut(const RankView& v, int64_t) override {
    const int32_t* dst_rank = a_.args[0].i32();
    const int32_t topk = v.shape.topk;
    const bool exact = v.shape.exact;
    const float* returned = FloatsAt(v, v.rank, v.layout.return_weights);
    std::vector<Term> terms;
    for (int64_t t = 0; t < s_; ++t) {
      const int32_t* to = dst_rank + t * topk;
      terms.clear();
      for (int32_t k = 0; k < topk; ++k) {
        if (exact ? to[k] < 0 : !IsPrimary(to, k)) continue;
        const int64_t assignment = t * topk + k;
        const float scale = exact && !returns_weights() ? returned[assignment] : 1.0f;
        terms.push_back({RowAt(v, v.rank, v.layout.returns, assignment), scale});
      }
      std::byte* y = a_.rets[0].raw() + t * v.shape.row_bytes;
      if (terms.empty()) {
        std::memset(y, 0, static_cast<size_t>(v.shape.row_bytes));
      } else {
        SumRows(a_.rets[0].type, y, terms.data(), static_cast<int64_t>(terms.size()), v.shape.hidden);
      }
    }
    if (returns_weights()) {
      float* home = a_.rets[1].f32();
      for (int64_t i = 0; i < s_ * topk; ++i) home[i] = dst_rank[i] >= 0 ? returned[i] : 0.0f;
    }
    return "";
  }

 private:
  bool returns_weights() const { return a_.kind == Kind::kDispatchGrad; }
  float scale(int64_t row) const { return returns_weights() ? 1.0f : a_.args[6].f32()[row]; }
  const std::byte* Out(int64_t row, size_t bytes) const { return a_.args[5].raw() + static_cast<size_t>(row) * bytes; }
};

}  // namespace moonep

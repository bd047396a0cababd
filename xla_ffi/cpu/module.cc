// The Python module of the CPU backend: FFI registrations, mapping of shared chunks, domains, and a pure planner.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <optional>
#include <stdexcept>

#include "xla_ffi/common/counters_binding.h"
#include "xla_ffi/common/shape_binding.h"
#include "xla_ffi/cpu/handlers.h"
#include "xla_ffi/cpu/plan_rows.h"
#include "xla_ffi/cpu/rank.h"

namespace nb = nanobind;

namespace {

using moonep::ChunkLayout;
using moonep::DomainShape;

uintptr_t Map(int fd, int64_t bytes, int flags) {
  void* p = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, flags, fd, 0);
  if (p == MAP_FAILED) {
    throw std::runtime_error("setup: mmap failed; got " + std::string(std::strerror(errno)) + " for " +
                             std::to_string(bytes) + " bytes, expected a mapping; lower tokens or stage_bytes");
  }
  return reinterpret_cast<uintptr_t>(p);
}

ChunkLayout LayoutOf(const DomainShape& shape) { return ChunkLayout::Of(shape, sizeof(moonep::ControlBlock)); }

void AddRank(int64_t domain, int64_t device, const DomainShape& shape, int32_t rank,
             const std::vector<uintptr_t>& chunks, const std::vector<std::string>& labels, const std::string& group,
             double timeout_s, double first_call_timeout_s, bool poison, int64_t delay_us, uint64_t delay_seed) {
  if (static_cast<int32_t>(chunks.size()) != shape.ranks || labels.size() != chunks.size()) {
    throw std::invalid_argument("setup: one chunk and one label per rank; got " + std::to_string(chunks.size()) +
                                " and " + std::to_string(labels.size()) + ", expected " + std::to_string(shape.ranks));
  }
  moonep::RankView view;
  view.shape = shape;
  view.layout = LayoutOf(shape);
  view.rank = rank;
  view.poison = poison;
  for (uintptr_t chunk : chunks) view.chunks.push_back(reinterpret_cast<std::byte*>(chunk));
  view.labels = labels;
  view.group = group;
  if (poison) {  // NaN wherever no rank has written yet
    std::byte* own = view.own();
    std::memset(own + view.layout.rows, 0xff, static_cast<size_t>(view.layout.bytes - view.layout.rows));
  }
  const auto ns = [](double s) { return static_cast<int64_t>(s * 1e9); };
  auto local = std::make_shared<moonep::LocalRank>(
      std::move(view), moonep::RankOptions{ns(timeout_s), ns(first_call_timeout_s), delay_us * 1000, delay_seed});
  if (!moonep::CpuRegistry::Get().Add(domain, device, local)) {
    throw std::invalid_argument("setup: device " + std::to_string(device) + " is already a rank of domain " +
                                std::to_string(domain));
  }
  local->Start();
}

std::optional<std::string> Error(int64_t domain) {
  for (const auto& rank : moonep::CpuRegistry::Get().RanksOf(domain)) {
    if (moonep::Failure failure = rank->error()) return failure.text;
  }
  return std::nullopt;
}

void Fail(int64_t domain, const std::string& text) {
  for (const auto& rank : moonep::CpuRegistry::Get().RanksOf(domain)) rank->Fail({moonep::Failure::kInternal, text});
}

void Stop(int64_t domain, bool) {
  nb::gil_scoped_release release;
  const auto ranks = moonep::CpuRegistry::Get().RanksOf(domain);
  moonep::CpuRegistry::Get().Remove(domain);
  for (const auto& rank : ranks) rank->Stop();
}

uint64_t Executed(int64_t domain) {
  uint64_t executed = 0;
  for (const auto& rank : moonep::CpuRegistry::Get().RanksOf(domain)) executed += rank->executed();
  return executed;
}

nb::dict CountersOf(int64_t domain) {
  moonep::Counters sum{};
  for (const auto& rank : moonep::CpuRegistry::Get().RanksOf(domain)) sum += rank->counters();
  return moonep::CountersDict(sum);
}

// Plans of all ranks, without a domain: the same code that the plan call runs, for tests and benchmarks of the planner.
nb::dict PlanAll(const DomainShape& shape, nb::ndarray<const int32_t, nb::ndim<3>, nb::c_contig, nb::device::cpu> ids) {
  const int64_t s = static_cast<int64_t>(ids.shape(1));
  if (static_cast<int32_t>(ids.shape(0)) != shape.ranks || static_cast<int32_t>(ids.shape(2)) != shape.topk) {
    throw std::invalid_argument("plan_all: ids [ranks, s, topk] do not fit the shape");
  }
  const size_t ranks = static_cast<size_t>(shape.ranks);
  const size_t per_rank = static_cast<size_t>(s * shape.topk);
  std::vector<std::vector<int32_t>> counts(ranks, std::vector<int32_t>(static_cast<size_t>(shape.experts)));
  moonep::PlanInputs in;
  for (size_t r = 0; r < ranks; ++r) {
    in.ids.push_back(ids.data() + r * per_rank);
    moonep::CountIds(shape, in.ids[r], static_cast<int64_t>(per_rank), counts[r].data());
    in.counts.push_back(counts[r].data());
  }
  const size_t rows = static_cast<size_t>(shape.recv_rows(s));
  const size_t epn = static_cast<size_t>(shape.epn());
  const size_t sizes[] = {per_rank, per_rank, rows, rows, rows, 2 * epn, 2 * epn, ranks * epn, ranks, ranks};
  const char* names[] = {"dst_rank",    "dst_row",    "src",         "primary",   "next",
                         "group_sizes", "group_rows", "slot_expert", "home_rows", "rank_rows"};
  constexpr size_t kArrays = 10;
  nb::dict result;
  int32_t* data[kArrays];
  for (size_t i = 0; i < kArrays; ++i) {
    data[i] = new int32_t[ranks * sizes[i]];
    nb::capsule owner(data[i], [](void* p) noexcept { delete[] static_cast<int32_t*>(p); });
    result[names[i]] = nb::ndarray<nb::numpy, int32_t>(data[i], {ranks, sizes[i]}, owner);
  }
  bool cascade = false;
  {
    nb::gil_scoped_release release;
    moonep::HostTables tables(shape, in);
    cascade = tables.cascade();
    for (size_t r = 0; r < ranks; ++r) {
      const int32_t me = static_cast<int32_t>(r);
      auto at = [&](size_t i) { return data[i] + r * sizes[i]; };
      const moonep::PlanArrays out{at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7), at(8), at(9)};
      tables.Groups(me, out);
      moonep::PlaceSource(shape, tables.tables(), me, in.ids[r], static_cast<int64_t>(per_rank), out);
      moonep::PlaceHosted(shape, tables.tables(), me, in, s, out);
    }
  }
  result["cascade"] = cascade;
  return result;
}

nb::capsule Capsule(XLA_FFI_Error* (*handler)(XLA_FFI_CallFrame*)) {
  return nb::capsule(reinterpret_cast<void*>(handler));
}

}  // namespace

NB_MODULE(_ffi_cpu, m) {
  nb::set_leak_warnings(false);  // what a program still holds when it ends is no error
  m.def("registrations", [] {
    nb::dict d;
    d["moonep_plan"] = Capsule(MoonepPlanCpu);
    d["moonep_dispatch"] = Capsule(MoonepDispatchCpu);
    d["moonep_combine"] = Capsule(MoonepCombineCpu);
    d["moonep_prefetch"] = Capsule(MoonepPrefetchCpu);
    d["moonep_reduce_grad"] = Capsule(MoonepReduceGradCpu);
    return d;
  });

  moonep::BindDomainShape(m, LayoutOf);

  m.def("map_fd", [](int fd, int64_t bytes) { return Map(fd, bytes, MAP_SHARED); });
  m.def("map_anonymous", [](int64_t bytes) { return Map(-1, bytes, MAP_PRIVATE | MAP_ANONYMOUS); });
  m.def("unmap",
        [](uintptr_t address, int64_t bytes) { munmap(reinterpret_cast<void*>(address), static_cast<size_t>(bytes)); });

  m.def("add_rank", &AddRank, nb::kw_only(), nb::arg("domain"), nb::arg("device"), nb::arg("shape"), nb::arg("rank"),
        nb::arg("chunks"), nb::arg("labels"), nb::arg("group"), nb::arg("timeout_s"), nb::arg("first_call_timeout_s"),
        nb::arg("poison"), nb::arg("delay_us"), nb::arg("delay_seed"));
  m.def("error", &Error);
  m.def("fail", &Fail);
  m.def("executed", &Executed);
  m.def("counters", &CountersOf);
  m.def("stop", &Stop, nb::arg("domain"), nb::arg("together"));  // peers see in any case that a rank has stopped
  m.def("ffi_api_version", [] { return std::make_pair(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR); });
  m.def("limits", [] { return nb::dict(); });
  m.def("plan_all", &PlanAll);
}

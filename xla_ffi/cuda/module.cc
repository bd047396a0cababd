// The Python module of the CUDA backend: FFI registrations, domains, and ranks that are launched by hand (loop-back).
#include <cuda_runtime.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <stdexcept>
#include <tuple>
#include <utility>

#include "xla_ffi/common/counters_binding.h"
#include "xla_ffi/common/shape_binding.h"
#include "xla_ffi/cuda/handlers.h"
#include "xla_ffi/cuda/registry.h"

namespace nb = nanobind;

namespace {

using moonep::ChunkLayoutGpu;
using moonep::DomainShape;
using moonep::GpuRank;
using moonep::GpuRankOptions;

uint64_t Ns(double seconds) { return static_cast<uint64_t>(seconds * 1e9); }

std::unique_ptr<GpuRank> MakeRank(const DomainShape& shape, int32_t rank, const std::vector<uintptr_t>& chunks,
                                  std::vector<std::string> labels, std::string group, const GpuRankOptions& options) {
  if (static_cast<int32_t>(chunks.size()) != shape.ranks || labels.size() != chunks.size()) {
    throw std::invalid_argument("setup: one chunk and one label per rank; got " + std::to_string(chunks.size()) +
                                " and " + std::to_string(labels.size()) + ", expected " + std::to_string(shape.ranks));
  }
  std::vector<std::byte*> pointers;
  for (uintptr_t chunk : chunks) pointers.push_back(reinterpret_cast<std::byte*>(chunk));
  std::string wrong;
  auto made = std::make_unique<GpuRank>(shape, rank, pointers, options, std::move(labels), std::move(group), &wrong);
  if (!wrong.empty()) throw std::runtime_error(wrong);
  return made;
}

// A call by raw device pointers: (pointer, dims, item bytes, element type) per buffer.
using Buffer = std::tuple<uintptr_t, std::vector<int64_t>, int64_t, int32_t>;

moonep::CallArgs MakeCall(int64_t kind, const std::vector<Buffer>& args, const std::vector<Buffer>& rets) {
  moonep::CallArgs call{static_cast<moonep::Kind>(kind), {}, {}};
  const auto array = [](const Buffer& b) {
    return moonep::Array{reinterpret_cast<void*>(std::get<0>(b)), std::get<1>(b), std::get<2>(b),
                         static_cast<moonep::ElementType>(std::get<3>(b))};
  };
  for (const Buffer& b : args) call.args.push_back(array(b));
  for (const Buffer& b : rets) call.rets.push_back(array(b));
  return call;
}

moonep::Counters CountersOf(const GpuRank& rank) {
  std::string wrong;
  const moonep::Counters counters = rank.counters(&wrong);
  if (!wrong.empty()) throw std::runtime_error(wrong);
  return counters;
}

nb::capsule Capsule(XLA_FFI_Error* (*handler)(XLA_FFI_CallFrame*)) {
  return nb::capsule(reinterpret_cast<void*>(handler));
}

}  // namespace

NB_MODULE(_ffi_cuda, m) {
  nb::set_leak_warnings(false);  // what a program still holds when it ends is no error
  m.def("registrations", [] {
    nb::dict d;
    d["moonep_plan"] = Capsule(MoonepPlanCuda);
    for (const char* name :
         {"moonep_plan_captured", "moonep_dispatch", "moonep_combine", "moonep_prefetch", "moonep_reduce_grad"}) {
      d[name] = Capsule(MoonepCapturedCuda);
    }
    return d;
  });

  moonep::BindDomainShape(m, ChunkLayoutGpu::Of);

  m.def(
      "add_rank",
      [](int64_t domain, int64_t device, const DomainShape& shape, int32_t rank, const std::vector<uintptr_t>& chunks,
         std::vector<std::string> labels, std::string group, double timeout_s, double first_call_timeout_s,
         int link_blocks, int local_blocks) {
        GpuRankOptions options;
        options.device = static_cast<int>(device);
        options.link_blocks = link_blocks;
        options.local_blocks = local_blocks;
        options.limit_ns = Ns(timeout_s);
        options.first_limit_ns = Ns(first_call_timeout_s);
        std::shared_ptr<GpuRank> made = MakeRank(shape, rank, chunks, std::move(labels), std::move(group), options);
        if (!moonep::GpuRegistry::Get().Add(domain, device, std::move(made))) {
          throw std::invalid_argument("setup: device " + std::to_string(device) + " is already a rank of domain " +
                                      std::to_string(domain));
        }
      },
      nb::kw_only(), nb::arg("domain"), nb::arg("device"), nb::arg("shape"), nb::arg("rank"), nb::arg("chunks"),
      nb::arg("labels"), nb::arg("group"), nb::arg("timeout_s"), nb::arg("first_call_timeout_s"),
      nb::arg("link_blocks"), nb::arg("local_blocks"));
  m.def("error", [](int64_t domain) -> std::optional<std::string> {
    for (const auto& rank : moonep::GpuRegistry::Get().RanksOf(domain)) {
      if (std::string text = rank->error(); !text.empty()) return text;
    }
    return std::nullopt;
  });
  m.def("fail", [](int64_t domain, const std::string& text) {
    for (const auto& rank : moonep::GpuRegistry::Get().RanksOf(domain)) rank->Fail(text);
  });
  m.def(
      "stop",
      [](int64_t domain, bool together) -> std::optional<std::string> {
        nb::gil_scoped_release release;
        const auto ranks = moonep::GpuRegistry::Get().RanksOf(domain);
        moonep::GpuRegistry::Get().Remove(domain);
        for (const auto& rank : ranks) {
          if (!together) rank->Leave();
        }
        int before = 0;
        cudaGetDevice(&before);
        for (const auto& rank : ranks) {  // kernels in flight must be done before their memory goes
          cudaSetDevice(rank->device());
          cudaDeviceSynchronize();
        }
        cudaSetDevice(before);
        for (const auto& rank : ranks) {  // what those kernels have found; one that left is in error by itself
          if (std::string text = rank->error(); together && !text.empty()) return text;
        }
        return std::nullopt;
      },
      nb::arg("domain"), nb::arg("together"));

  m.def("executed", [](int64_t domain) {
    uint64_t calls = 0;
    for (const auto& rank : moonep::GpuRegistry::Get().RanksOf(domain)) calls += rank->enqueued();
    return calls;
  });
  m.def("counters", [](int64_t domain) {
    moonep::Counters sum{};
    for (const auto& rank : moonep::GpuRegistry::Get().RanksOf(domain)) sum += CountersOf(*rank);
    return moonep::CountersDict(sum);
  });
  m.def("ffi_api_version", [] { return std::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR); });
  m.def("cuda_runtime_version", [] {
    int version = 0;
    cudaRuntimeGetVersion(&version);
    return version;
  });
  m.def("limits", [] {
    nb::dict d;
    d["ranks"] = moonep::kMaxRanks;
    d["topk"] = moonep::kMaxTopk;
    d["experts"] = moonep::kMaxExperts;
    d["leaves"] = moonep::kMaxLeaves;
    return d;
  });

  // Ranks without XLA, several of them on one device: launched phase by phase, breadth-first.
  nb::class_<GpuRank>(m, "LoopbackRank")
      .def(nb::new_([](const DomainShape& shape, int32_t rank, const std::vector<uintptr_t>& chunks, double timeout_s,
                       int device, int link_blocks, int local_blocks, bool whole, int rounds) {
             std::vector<std::string> labels;
             for (size_t r = 0; r < chunks.size(); ++r) labels.push_back("rank " + std::to_string(r));
             GpuRankOptions options;
             options.device = device;
             options.link_blocks = link_blocks;
             options.local_blocks = local_blocks;
             options.whole = whole;
             options.rounds = rounds;
             options.limit_ns = options.first_limit_ns = Ns(timeout_s);
             return MakeRank(shape, rank, chunks, std::move(labels), "the loop-back group", options);
           }),
           nb::kw_only(), nb::arg("shape"), nb::arg("rank"), nb::arg("chunks"), nb::arg("timeout_s"),
           nb::arg("device") = 0, nb::arg("link_blocks") = 0, nb::arg("local_blocks") = 0, nb::arg("whole") = true,
           nb::arg("rounds") = 0)
      .def("counters", [](const GpuRank& self) { return moonep::CountersDict(CountersOf(self)); })
      .def("check",
           [](const GpuRank& self, int64_t kind, const std::vector<Buffer>& args, const std::vector<Buffer>& rets) {
             return moonep::CheckOperands(self.shape(), MakeCall(kind, args, rets));
           })
      .def("whole", [](const GpuRank& self, int64_t kind, const std::vector<Buffer>& args,
                       const std::vector<Buffer>& rets) { return self.Whole(MakeCall(kind, args, rets)); })
      .def("rounds", [](const GpuRank& self, int64_t kind, const std::vector<Buffer>& args,
                        const std::vector<Buffer>& rets) { return self.Rounds(MakeCall(kind, args, rets)); })
      .def("launch",
           [](GpuRank& self, int64_t kind, const std::vector<Buffer>& args, const std::vector<Buffer>& rets,
              int64_t site, int64_t round, int phase, uintptr_t stream) {
             const moonep::CallArgs call = MakeCall(kind, args, rets);
             const cudaError_t e =
                 self.Launch(call, moonep::SiteHash(kind, 0, site), round, static_cast<moonep::Phase>(phase),
                             reinterpret_cast<cudaStream_t>(stream));
             if (e != cudaSuccess) throw std::runtime_error(cudaGetErrorString(e));
           })
      .def("prepost",
           [](GpuRank& self, int64_t kind, const std::vector<Buffer>& args, const std::vector<Buffer>& rets,
              int64_t site, uintptr_t stream) {
             const cudaError_t e = self.Prepost(MakeCall(kind, args, rets), moonep::SiteHash(kind, 0, site),
                                                reinterpret_cast<cudaStream_t>(stream));
             if (e != cudaSuccess) throw std::runtime_error(cudaGetErrorString(e));
           })
      .def("leave", [](GpuRank& self) { self.Leave(); })
      .def("fail", [](GpuRank& self, const std::string& text) { self.Fail(text); })
      .def("error", [](const GpuRank& self) { return self.error(); });
  m.def("copy", [](uintptr_t to, uintptr_t from, int64_t bytes, int blocks, uintptr_t stream) {
    const cudaError_t e = moonep::LaunchCopy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes,
                                             blocks, reinterpret_cast<cudaStream_t>(stream));
    if (e != cudaSuccess) throw std::runtime_error(cudaGetErrorString(e));
  });
}

// XLA FFI glue of the CUDA backend: wraps buffers, finds the rank of this device, enqueues. Never waits.
#include "xla_ffi/cuda/handlers.h"

#include <cuda_runtime.h>

#include <memory>
#include <string>
#include <utility>

#include "xla_ffi/common/buffers.h"
#include "xla_ffi/cuda/registry.h"

namespace ffi = xla::ffi;

namespace {

ffi::Error Enqueue(cudaStream_t stream, int32_t device, int64_t domain, int64_t kind, int64_t channel, int64_t site,
                   ffi::RemainingArgs args, ffi::RemainingRets rets) {
  const char* op = moonep::KindName(kind);
  std::shared_ptr<moonep::GpuRank> rank = moonep::GpuRegistry::Get().Find(domain, device);
  if (!rank) return ffi::Error(ffi::ErrorCode::kFailedPrecondition, moonep::NoDomain(op, domain, device));
  if (std::string first = rank->error(); !first.empty()) {
    return ffi::Error(ffi::ErrorCode::kDeadlineExceeded, std::move(first));
  }
  moonep::CallArgs call{static_cast<moonep::Kind>(kind), {}, {}};
  std::string wrong = moonep::WrapAll(args, rets, &call);
  if (wrong.empty()) wrong = rank->Enqueue(call, channel, site, stream);
  return wrong.empty() ? ffi::Error::Success() : ffi::Error(ffi::ErrorCode::kInvalidArgument, std::move(wrong));
}

}  // namespace

#define MOONEP_BINDING()                        \
  ffi::Ffi::Bind()                              \
      .Ctx<ffi::PlatformStream<cudaStream_t>>() \
      .Ctx<ffi::DeviceOrdinal>()                \
      .Attr<int64_t>("domain")                  \
      .Attr<int64_t>("kind")                    \
      .Attr<int64_t>("channel")                 \
      .Attr<int64_t>("site")                    \
      .RemainingArgs()                          \
      .RemainingRets()

// Not in command buffers: one handler a step must run to see errors. EPConfig.capture_plan picks the other one.
XLA_FFI_DEFINE_HANDLER_SYMBOL(MoonepPlanCuda, Enqueue, MOONEP_BINDING());
XLA_FFI_DEFINE_HANDLER_SYMBOL(MoonepCapturedCuda, Enqueue, MOONEP_BINDING(), {ffi::Traits::kCmdBufferCompatible});

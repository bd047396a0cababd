// XLA FFI glue: wraps buffers, finds the rank of this device, submits, returns a future. Never waits.
#include "xla_ffi/cpu/handlers.h"

#include <memory>
#include <string>
#include <utility>

#include "xla_ffi/cpu/completer.h"
#include "xla_ffi/cpu/ops.h"
#include "xla_ffi/cpu/registry.h"

namespace ffi = xla::ffi;

namespace {

// Tells a launch from 0, which the log uses for "the oldest call of this key".
constexpr uint64_t kLaunchBit = uint64_t{1} << 63;

using moonep::Failure;
using moonep::Kind;

ffi::Error ToError(const Failure& failure) {
  switch (failure.code) {
    case Failure::kDeadline:
      return ffi::Error(ffi::ErrorCode::kDeadlineExceeded, failure.text);
    case Failure::kInvalid:
      return ffi::Error(ffi::ErrorCode::kInvalidArgument, failure.text);
    case Failure::kClosed:
      return ffi::Error(ffi::ErrorCode::kCancelled, failure.text);
    case Failure::kNone:
    case Failure::kInternal:
      break;
  }
  return ffi::Error(ffi::ErrorCode::kInternal, failure.text);
}

moonep::Array Wrap(const ffi::AnyBuffer& buffer) {
  moonep::Array array;
  array.data = buffer.untyped_data();
  array.dims.assign(buffer.dimensions().begin(), buffer.dimensions().end());
  array.item_bytes = static_cast<int64_t>(ffi::ByteWidth(buffer.element_type()));
  switch (buffer.element_type()) {
    case ffi::DataType::F32:
      array.type = moonep::ElementType::kF32;
      break;
    case ffi::DataType::F16:
      array.type = moonep::ElementType::kF16;
      break;
    case ffi::DataType::BF16:
      array.type = moonep::ElementType::kBF16;
      break;
    default:
      break;
  }
  return array;
}

ffi::Future Refuse(ffi::Promise promise, ffi::ErrorCode code, std::string text) {
  ffi::Future future(promise);
  promise.SetError(ffi::Error(code, std::move(text)));
  return future;
}

std::string NoDomain(const char* op, int64_t domain, int32_t device) {
  return std::string(op) + ": this process has no such domain; got a call for domain " + std::to_string(domain) +
         " on device " + std::to_string(device) +
         ", expected a domain that is set up and not closed; call moonep_jax.setup on all of the mesh's processes, and "
         "close() after the last step";
}

ffi::Future Submit(int32_t device, ffi::RunId run, int64_t domain, int64_t kind_number, int64_t channel, int64_t site,
                   ffi::RemainingArgs args, ffi::RemainingRets rets) {
  ffi::Promise promise;
  const Kind kind = static_cast<Kind>(kind_number);
  const char* op = moonep::KindName(static_cast<uint64_t>(kind_number));
  std::shared_ptr<moonep::LocalRank> rank = moonep::Registry::Get().Find(domain, device);
  if (!rank) return Refuse(promise, ffi::ErrorCode::kFailedPrecondition, NoDomain(op, domain, device));

  moonep::CallArgs call_args{kind, {}, {}};
  for (size_t i = 0; i < args.size(); ++i) {
    auto buffer = args.get<ffi::AnyBuffer>(i);
    if (!buffer.has_value()) return Refuse(promise, ffi::ErrorCode::kInternal, buffer.error().message());
    call_args.args.push_back(Wrap(*buffer));
  }
  for (size_t i = 0; i < rets.size(); ++i) {
    auto buffer = rets.get<ffi::AnyBuffer>(i);
    if (!buffer.has_value()) return Refuse(promise, ffi::ErrorCode::kInternal, buffer.error().message());
    call_args.rets.push_back(Wrap(**buffer));
  }
  int32_t ticket = 0;
  if (kind != Kind::kPlan) {
    const size_t at = kind == Kind::kCombine || kind == Kind::kDispatchGrad ? 4 : 1;
    if (call_args.args.size() <= at) return Refuse(promise, ffi::ErrorCode::kInvalidArgument, "too few operands");
    ticket = call_args.args[at].i32()[0];
    if (ticket < 0) {
      return Refuse(promise, ffi::ErrorCode::kInvalidArgument,
                    std::string(op) +
                        ": the plan is poisoned; got ticket -1, expected a plan that succeeded; see the "
                        "domain's first error (ep.check())");
    }
  }
  std::string wrong;
  std::unique_ptr<moonep::Call> call = moonep::MakeCall(rank->view().shape, std::move(call_args), &wrong);
  if (!call) return Refuse(promise, ffi::ErrorCode::kInvalidArgument, std::move(wrong));
  call->key = {static_cast<uint64_t>(kind_number), static_cast<uint64_t>(channel), static_cast<uint64_t>(site),
               static_cast<uint64_t>(ticket)};
  call->launch = static_cast<uint64_t>(run.run_id) | kLaunchBit;
  call->done = [promise](const Failure& failure) mutable {
    if (failure) {
      promise.SetError(ToError(failure));
    } else {
      promise.SetAvailable();
    }
  };
  ffi::Future future(promise);
  rank->Submit(std::move(call));
  return future;
}

}  // namespace

#define MOONEP_HANDLER(Symbol)                                 \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(Symbol, Submit,                \
                                ffi::Ffi::Bind()               \
                                    .Ctx<ffi::DeviceOrdinal>() \
                                    .Ctx<ffi::RunId>()         \
                                    .Attr<int64_t>("domain")   \
                                    .Attr<int64_t>("kind")     \
                                    .Attr<int64_t>("channel")  \
                                    .Attr<int64_t>("site")     \
                                    .RemainingArgs()           \
                                    .RemainingRets())

MOONEP_HANDLER(MoonepPlanCpu);
MOONEP_HANDLER(MoonepDispatchCpu);
MOONEP_HANDLER(MoonepCombineCpu);
MOONEP_HANDLER(MoonepPrefetchCpu);
MOONEP_HANDLER(MoonepReduceGradCpu);

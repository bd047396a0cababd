// XLA FFI glue: wraps buffers, finds the rank of this device, submits, returns a future. Never waits.
#include "xla_ffi/cpu/handlers.h"

#include <memory>
#include <string>
#include <utility>

#include "xla_ffi/common/buffers.h"
#include "xla_ffi/common/messages.h"
#include "xla_ffi/cpu/completer.h"
#include "xla_ffi/cpu/ops.h"
#include "xla_ffi/cpu/rank.h"

namespace ffi = xla::ffi;

namespace {

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

ffi::Future Refuse(ffi::Promise promise, ffi::ErrorCode code, std::string text) {
  ffi::Future future(promise);
  promise.SetError(ffi::Error(code, std::move(text)));
  return future;
}

// Of its own for the race detector, which cannot see that XLA orders it after the plan call (.ci/tsan.supp).
int32_t ReadTicket(const int32_t* ticket) { return *ticket; }

ffi::Future Submit(int32_t device, ffi::RunId run, int64_t domain, int64_t kind_number, int64_t channel, int64_t site,
                   ffi::RemainingArgs args, ffi::RemainingRets rets) {
  ffi::Promise promise;
  const Kind kind = static_cast<Kind>(kind_number);
  const char* op = moonep::KindName(kind_number);
  std::shared_ptr<moonep::LocalRank> rank = moonep::CpuRegistry::Get().Find(domain, device);
  if (!rank) return Refuse(promise, ffi::ErrorCode::kFailedPrecondition, moonep::NoDomain(op, domain, device));

  moonep::CallArgs call_args{kind, {}, {}};
  std::string wrong = moonep::WrapAll(args, rets, &call_args);
  if (!wrong.empty()) return Refuse(promise, ffi::ErrorCode::kInternal, std::move(wrong));
  const int ticket_at = call_args.ticket_at();
  const int32_t* ticket_data = ticket_at >= 0 && static_cast<size_t>(ticket_at) < call_args.args.size()
                                   ? call_args.args[static_cast<size_t>(ticket_at)].i32()
                                   : nullptr;
  std::unique_ptr<moonep::Call> call = moonep::MakeCall(rank->view().shape, std::move(call_args), &wrong);
  if (!call) return Refuse(promise, ffi::ErrorCode::kInvalidArgument, std::move(wrong));
  const int32_t ticket = ticket_data != nullptr ? ReadTicket(ticket_data) : 0;  // checked: an int32 of one element
  if (ticket < 0) {
    // The peers would wait for this call in vain.
    const moonep::RankView& view = rank->view();
    rank->Fail({Failure::kInvalid, moonep::PoisonedPlan(op, ticket, view.labels[static_cast<size_t>(view.rank)])});
    promise.SetError(ToError(rank->error()));  // an earlier one stays
    return ffi::Future(promise);
  }
  call->key = {static_cast<uint64_t>(kind_number), static_cast<uint64_t>(channel), static_cast<uint64_t>(site),
               static_cast<uint64_t>(ticket), static_cast<uint64_t>(run.run_id)};
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

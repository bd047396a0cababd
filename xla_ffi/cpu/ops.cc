#include "xla_ffi/cpu/ops.h"

#include <utility>

#include "xla_ffi/cpu/row_calls.h"
#include "xla_ffi/cpu/weight_calls.h"

namespace moonep {

std::unique_ptr<Call> MakeCall(const DomainShape& shape, CallArgs args, std::string* wrong) {
  *wrong = CheckOperands(shape, args);
  if (!wrong->empty()) return nullptr;
  const int64_t s = args.tokens();
  std::unique_ptr<Call> call;
  switch (args.kind) {
    case Kind::kPlan:
      call = std::make_unique<PlanCall>(std::move(args), s);
      break;
    case Kind::kDispatch:
    case Kind::kCombineGrad:
      call = std::make_unique<DispatchCall>(std::move(args), s);
      break;
    case Kind::kCombine:
    case Kind::kDispatchGrad:
      call = std::make_unique<CombineCall>(std::move(args), s);
      break;
    case Kind::kPrefetch:
      call = std::make_unique<PrefetchCall>(std::move(args));
      break;
    case Kind::kReduceGrad:
      call = std::make_unique<ReduceGradCall>(std::move(args));
      break;
  }
  return call;
}

}  // namespace moonep

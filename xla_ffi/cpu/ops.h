// Makes the calls of the CPU backend from checked operands. Free of XLA; used by the handlers.
#pragma once

#include <memory>
#include <string>

#include "xla_ffi/common/operands.h"
#include "xla_ffi/cpu/call.h"

namespace moonep {

// Null, with the reason in *wrong, if the operands do not fit the domain.
std::unique_ptr<Call> MakeCall(const DomainShape& shape, CallArgs args, std::string* wrong);

}  // namespace moonep

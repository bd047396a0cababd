// XLA FFI buffers as the arrays that the backends work on; errors as XLA errors.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "xla/ffi/api/ffi.h"
#include "xla_ffi/common/operands.h"

namespace moonep {

inline Array Wrap(const xla::ffi::AnyBuffer& buffer) {
  namespace ffi = xla::ffi;
  Array array;
  array.data = buffer.untyped_data();
  array.dims.assign(buffer.dimensions().begin(), buffer.dimensions().end());
  array.item_bytes = static_cast<int64_t>(ffi::ByteWidth(buffer.element_type()));
  switch (buffer.element_type()) {
    case ffi::DataType::F32:
      array.type = ElementType::kF32;
      break;
    case ffi::DataType::F16:
      array.type = ElementType::kF16;
      break;
    case ffi::DataType::BF16:
      array.type = ElementType::kBF16;
      break;
    default:
      break;
  }
  return array;
}

// All operands and results of a call; says what is wrong, or an empty string.
inline std::string WrapAll(xla::ffi::RemainingArgs args, xla::ffi::RemainingRets rets, CallArgs* call) {
  for (size_t i = 0; i < args.size(); ++i) {
    auto buffer = args.get<xla::ffi::AnyBuffer>(i);
    if (!buffer.has_value()) return buffer.error().message();
    call->args.push_back(Wrap(*buffer));
  }
  for (size_t i = 0; i < rets.size(); ++i) {
    auto buffer = rets.get<xla::ffi::AnyBuffer>(i);
    if (!buffer.has_value()) return buffer.error().message();
    call->rets.push_back(Wrap(**buffer));
  }
  return "";
}

inline std::string NoDomain(const char* op, int64_t domain, int32_t device) {
  return std::string(op) + ": this process has no such domain; got a call for domain " + std::to_string(domain) +
         " on device " + std::to_string(device) +
         ", expected a domain that is set up and not closed; call moonep_jax.setup on all of the mesh's processes, and "
         "close() after the last step";
}

}  // namespace moonep

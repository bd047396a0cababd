// The XLA FFI symbols of the CUDA backend. The kind attribute says which op a call is.
#pragma once

#include "xla/ffi/api/ffi.h"

XLA_FFI_DECLARE_HANDLER_SYMBOL(MoonepPlanCuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(MoonepCapturedCuda);

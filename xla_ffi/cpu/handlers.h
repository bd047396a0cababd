// The XLA FFI symbols of the CPU backend.
#pragma once

#include "xla/ffi/api/ffi.h"

XLA_FFI_DECLARE_HANDLER_SYMBOL(MoonepPlanCpu);
XLA_FFI_DECLARE_HANDLER_SYMBOL(MoonepDispatchCpu);
XLA_FFI_DECLARE_HANDLER_SYMBOL(MoonepCombineCpu);
XLA_FFI_DECLARE_HANDLER_SYMBOL(MoonepPrefetchCpu);
XLA_FFI_DECLARE_HANDLER_SYMBOL(MoonepReduceGradCpu);

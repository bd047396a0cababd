// (domain id, device ordinal as XLA gives it to a handler) -> the rank on that device.
#pragma once

#include "xla_ffi/common/registry.h"
#include "xla_ffi/cuda/gpu_rank.h"

namespace moonep {

using GpuRegistry = Registry<GpuRank>;

}  // namespace moonep

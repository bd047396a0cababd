// Launcher of the kernel that turns counts into a plan's tables. Raw pointers; knows no XLA.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "xla_ffi/core/placement.h"
#include "xla_ffi/core/planner.h"

namespace moonep {

// Device memory, in the shapes of PlanTables and PlannerScratch.
struct PlanTablesArgs {
  DomainShape shape;
  int32_t me;            // this rank: whose group_sizes and group_rows are written
  const int32_t* count;  // [R, E]
  int32_t* totals;       // [E] scratch
  int32_t* alloc;        // [E, R]
  PlannerScratch scratch;
  PlanTables tables;     // count and alloc as above
  int32_t* group_sizes;  // [2*epn]
  int32_t* group_rows;   // [2*epn]
};

// One block: the balance loop is a chain of argmax over at most 128 ranks, so more blocks would only wait for it.
cudaError_t LaunchPlanTables(const PlanTablesArgs& args, cudaStream_t stream);

}  // namespace moonep

#include "xla_ffi/cuda/block_team.cuh"
#include "xla_ffi/cuda/plan_tables.h"

namespace moonep {
namespace {

constexpr int kThreads = 1024;

__global__ void __launch_bounds__(kThreads) PlanTablesKernel(const PlanTablesArgs a) {
  const BlockTeam team;
  const DomainShape& d = a.shape;
  for (int e = team.rank(); e < d.experts; e += team.size()) {
    int32_t total = 0;
    for (int r = 0; r < d.ranks; ++r) total += a.count[static_cast<int64_t>(r) * d.experts + e];
    a.totals[e] = total;
  }
  team.sync();
  Allocate(team, d, a.totals, a.alloc, a.scratch);
  team.sync();
  BuildPrefixes(team, d, a.tables);
  BuildGroups(team, d, a.tables, a.me, a.group_sizes, a.group_rows);
}

}  // namespace

cudaError_t LaunchPlanTables(const PlanTablesArgs& args, cudaStream_t stream) {
  PlanTablesKernel<<<1, kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace moonep

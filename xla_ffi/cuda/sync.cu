#include "xla_ffi/cuda/kernels.h"
#include "xla_ffi/cuda/sync.cuh"

namespace moonep {
namespace {

__global__ void __launch_bounds__(kMaxRanks)
    BeginKernel(const __grid_constant__ RankViewGpu v, Part which, CallId id, bool credits) {
  ControlBlockGpu& own = v.own();
  ControlBlockGpu::PartState& part = own.part[static_cast<int>(which)];
  __shared__ bool live;
  __shared__ int32_t failed;
  if (threadIdx.x == 0) failed = -1;
  __syncthreads();
  const int r = static_cast<int>(threadIdx.x);
  if (r < v.shape.ranks && LoadRelaxedSys(&own.error[r].value) != 0) failed = r;  // any of them
  __syncthreads();
  if (threadIdx.x == 0) {
    part.epoch += 1;
    part.kind = id.kind;
    // A plan's ticket is its epoch, without the sign bit: -1 says "poisoned".
    part.ticket = id.ticket != nullptr ? *id.ticket : static_cast<int32_t>(part.epoch & 0x7fffffffu);
    part.tag = MixTag(id.site_hash, id.ticket != nullptr ? part.ticket : 0);
    if (failed >= 0) {
      AdoptError(v, failed);
    } else if (part.busy != 0) {
      RaiseError(v, {ErrorRecord::kBusy, part.kind, part.ticket, v.rank, {0, 0}, 0});
    }
    live = failed < 0 && part.busy == 0 && part.ticket >= 0;
    part.busy = 1;
  }
  __syncthreads();
  bool ok = live;
  // A receiver still copies out what was sent in the epoch before: wait for its word before anything is sent.
  if (ok && credits) {
    ok = WaitForAll(v, own.consumed[static_cast<int>(which)], part.epoch - 1, false, part);
  }
  if (threadIdx.x == 0) part.live = ok;
}

__global__ void __launch_bounds__(kMaxRanks) WaitKernel(const __grid_constant__ RankViewGpu v, Part which) {
  ControlBlockGpu& own = v.own();
  ControlBlockGpu::PartState& part = own.part[static_cast<int>(which)];
  if (part.live == 0) return;
  const bool ok = WaitForAll(v, own.arrived[static_cast<int>(which)], part.epoch, true, part);
  if (threadIdx.x == 0 && !ok) part.live = 0;
}

__global__ void PrepostKernel(const __grid_constant__ RankViewGpu v, Part which, CallId id) {
  ControlBlockGpu& own = v.own();
  const int r = static_cast<int>(threadIdx.x);
  if (r >= v.shape.ranks || r == v.rank) return;
  const uint32_t epoch = own.part[static_cast<int>(which)].epoch + 1;
  const uint64_t word = PackWord(epoch, MixTag(id.site_hash, id.ticket != nullptr ? *id.ticket : 0));
  own.arrived[static_cast<int>(which)][r].value = word;
  own.consumed[static_cast<int>(which)][r].value = word;
}

}  // namespace

cudaError_t LaunchPrepost(const RankViewGpu& v, Part part, const CallId& id, cudaStream_t stream) {
  PrepostKernel<<<1, kMaxRanks, 0, stream>>>(v, part, id);
  return cudaGetLastError();
}

cudaError_t LaunchBegin(const RankViewGpu& v, Part part, const CallId& id, bool credits, cudaStream_t stream) {
  BeginKernel<<<1, kMaxRanks, 0, stream>>>(v, part, id, credits);
  return cudaGetLastError();
}

cudaError_t LaunchWait(const RankViewGpu& v, Part part, cudaStream_t stream) {
  WaitKernel<<<1, kMaxRanks, 0, stream>>>(v, part);
  return cudaGetLastError();
}

}  // namespace moonep

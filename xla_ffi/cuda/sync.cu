#include "xla_ffi/cuda/kernels.h"
#include "xla_ffi/cuda/sync.cuh"

namespace moonep {
namespace {

__global__ void __launch_bounds__(kMaxRanks)
    BeginKernel(const __grid_constant__ RankViewGpu v, Part which, const __grid_constant__ CallId id) {
  StreamTurn();
  RecordCall(v, which, BeginCall(v, which, id));
}

__global__ void __launch_bounds__(kMaxRanks)
    WaitKernel(const __grid_constant__ RankViewGpu v, Part which, uint32_t more) {
  StreamTurn();
  const uint64_t waited_ns = WaitArrived(v, which, more);
  if (threadIdx.x == 0) CountWait(v, v.own().part[static_cast<int>(which)].kind, waited_ns);
}

__global__ void RaiseKernel(const __grid_constant__ RankViewGpu v, ErrorRecord::Code code) {
  StreamTurn();
  ErrorRecord record = {code, -1, 0, v.rank, {0, 0}, 0};
  record.missing[v.rank / 64] = 1ull << (v.rank % 64);
  RaiseError(v, record);
}

__global__ void PrepostKernel(const __grid_constant__ RankViewGpu v, Part which, CallId id, uint32_t rounds) {
  ControlBlockGpu& own = v.own();
  const int r = static_cast<int>(threadIdx.x);
  if (r >= v.shape.ranks || r == v.rank) return;
  const uint32_t epoch = own.part[static_cast<int>(which)].epoch + rounds;
  const uint64_t word = PackWord(epoch, MixTag(id.site_hash, id.ticket != nullptr ? *id.ticket : 0));
  own.arrived[static_cast<int>(which)][r].value = word;
  own.consumed[static_cast<int>(which)][r].value = word;
}

}  // namespace

cudaError_t LaunchPrepost(const RankViewGpu& v, Part part, const CallId& id, uint32_t rounds, cudaStream_t stream) {
  PrepostKernel<<<1, kMaxRanks, 0, stream>>>(v, part, id, rounds);
  return cudaGetLastError();
}

cudaError_t LaunchBegin(const RankViewGpu& v, Part part, const CallId& id, cudaStream_t stream) {
  return LaunchKernel(BeginKernel, {1, kMaxRanks}, stream, v, part, id);
}

cudaError_t LaunchRaise(const RankViewGpu& v, ErrorRecord::Code code, cudaStream_t stream) {
  return LaunchKernel(RaiseKernel, {1, 1}, stream, v, code);
}

cudaError_t LaunchWait(const RankViewGpu& v, Part part, uint32_t more, cudaStream_t stream) {
  return LaunchKernel(WaitKernel, {1, kMaxRanks}, stream, v, part, more);
}

}  // namespace moonep

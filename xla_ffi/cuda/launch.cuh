// Kernel launches with what <<<>>> has no place for: clusters, large shared memory, early starts. Knows no kernel.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

namespace moonep {

// Blocks of a cluster are resident together, always: the one kind of grid of which a block may wait for a peer while
// others of it have work left. Eight is what every device with clusters can do.
constexpr int kClusterBlocks = 8;

struct LaunchShape {
  dim3 grid;
  int threads;
  size_t shared = 0;  // dynamic shared memory, bytes
  int cluster = 1;    // blocks
};

// While one lives, this thread's launches load their kernels and do not run them. The driver loads a kernel at its
// first launch and may wait for the device to do so - which may wait for a peer.
class LoadOnly {
 public:
  LoadOnly() { Active() = true; }
  ~LoadOnly() { Active() = false; }
  LoadOnly(const LoadOnly&) = delete;
  LoadOnly& operator=(const LoadOnly&) = delete;
  static bool& Active() {
    static thread_local bool active = false;
    return active;
  }
};

// A kernel may be put on the device while the one before it on the stream still runs; it must begin with StreamTurn(),
// which waits until that one is done and its writes are visible.
template <class... Params, class... Args>
cudaError_t LaunchKernel(void (*kernel)(Params...), const LaunchShape& shape, cudaStream_t stream,
                         const Args&... args) {
  if (shape.shared > 32 * 1024) {  // from 48 KiB on, the kernel's static shared memory included, it must be allowed
    const cudaError_t e =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shape.shared));
    if (e != cudaSuccess) return e;
  }
  if (LoadOnly::Active()) {
    cudaFuncAttributes loaded;
    return cudaFuncGetAttributes(&loaded, kernel);
  }
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = static_cast<unsigned>(shape.cluster);
  attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = shape.grid;
  config.blockDim = dim3(static_cast<unsigned>(shape.threads));
  config.dynamicSmemBytes = shape.shared;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = shape.cluster > 1 ? 2 : 1;
  return cudaLaunchKernelEx(&config, kernel, Params(args)...);
}

#if defined(__CUDACC__)
// The first statement of every kernel: the kernels before it on the stream are done.
__device__ inline void StreamTurn() { cudaGridDependencySynchronize(); }

// The next kernel on the stream may take free places on the device. Only once this one waits for no peer any more: its
// blocks sit there until this grid is done, and must not keep out what a peer on the same device still has to run.
__device__ inline void LetNextStart() { cudaTriggerProgrammaticLaunchCompletion(); }
#endif

}  // namespace moonep

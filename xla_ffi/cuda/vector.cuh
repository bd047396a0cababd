// Rows as vectors: the widest access that a row's size and addresses allow, and float32 arithmetic on its elements.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "xla_ffi/cuda/kernels.h"

namespace moonep {

// Calls f with a value of the vector type to use for rows of `bytes` bytes at these addresses, of kLeast bytes or more.
template <size_t kLeast, class F>
cudaError_t WithVector(int64_t bytes, uintptr_t addresses, F f) {
  const uint64_t bits = static_cast<uint64_t>(bytes) | addresses;
  if (bits % 16 == 0) return f(uint4{});
  if (bits % 8 == 0) return f(uint2{});
  if (bits % 4 == 0) return f(uint32_t{});
  if constexpr (kLeast <= 2) {
    if (bits % 2 == 0) return f(uint16_t{});
  }
  if constexpr (kLeast == 1) return f(uint8_t{});
  return cudaErrorMisalignedAddress;
}

// Streaming accesses: every byte is used once here, so it should not push others out of the caches.
template <class V>
__device__ inline V LoadOnce(const V* p) {
  return __ldcs(p);
}
template <class V>
__device__ inline void StoreOnce(V* p, V v) {
  __stcs(p, v);
}

struct F32Gpu {
  using Storage = float;
  static __device__ float Load(float v) { return v; }
  static __device__ float Store(float v) { return v; }
};
struct F16Gpu {
  using Storage = __half;
  static __device__ float Load(__half v) { return __half2float(v); }
  static __device__ __half Store(float v) { return __float2half_rn(v); }
};
struct BF16Gpu {
  using Storage = __nv_bfloat16;
  static __device__ float Load(__nv_bfloat16 v) { return __bfloat162float(v); }
  static __device__ __nv_bfloat16 Store(float v) { return __float2bfloat16_rn(v); }
};

template <class F>
cudaError_t WithRowType(RowType type, F f) {
  switch (type) {
    case RowType::kF32:
      return f(F32Gpu{});
    case RowType::kF16:
      return f(F16Gpu{});
    case RowType::kBF16:
      return f(BF16Gpu{});
  }
  return cudaErrorInvalidValue;
}

// The elements of one vector, as float32 sums. Multiplies and adds round separately: no contraction to FMA.
template <class E, class V>
struct Sum {
  static constexpr int kElements =
      sizeof(V) / sizeof(typename E::Storage) > 0 ? sizeof(V) / sizeof(typename E::Storage) : 1;
  float v[kElements];

  __device__ void Start(const V& row, float scale) {
    const auto* in = reinterpret_cast<const typename E::Storage*>(&row);
#pragma unroll
    for (int i = 0; i < kElements; ++i) v[i] = __fmul_rn(E::Load(in[i]), scale);
  }
  __device__ void Add(const V& row, float scale) {
    const auto* in = reinterpret_cast<const typename E::Storage*>(&row);
#pragma unroll
    for (int i = 0; i < kElements; ++i) v[i] = __fadd_rn(v[i], __fmul_rn(E::Load(in[i]), scale));
  }
  __device__ V Rounded() const {
    V row;
    auto* out = reinterpret_cast<typename E::Storage*>(&row);
#pragma unroll
    for (int i = 0; i < kElements; ++i) out[i] = E::Store(v[i]);
    return row;
  }
};

}  // namespace moonep

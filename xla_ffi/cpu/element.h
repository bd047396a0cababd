// Arithmetic on rows: elements are widened to float32, summed there, and rounded once (to nearest, ties to even).
// Multiplies and adds are separate operations (-ffp-contract=off): the GPU kernels do the same.
#pragma once

#include <cstdint>
#include <cstring>

#include "xla_ffi/common/operands.h"

namespace moonep {

inline uint32_t Bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}
inline float FromBits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

struct F32 {
  using Storage = float;
  static float Load(float v) { return v; }
  static float Store(float v) { return v; }
};

struct BF16 {
  using Storage = uint16_t;
  static float Load(uint16_t v) { return FromBits(static_cast<uint32_t>(v) << 16); }
  static uint16_t Store(float v) {
    const uint32_t bits = Bits(v);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const uint32_t quiet_nan = (bits >> 16) | 0x40u;
    return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? quiet_nan : rounded);
  }
};

struct F16 {
  using Storage = uint16_t;
  static float Load(uint16_t v) {
    const uint32_t sign = static_cast<uint32_t>(v & 0x8000u) << 16;
    const uint32_t magnitude = v & 0x7fffu;
    // Scaling by 2^112 moves the exponent from bias 15 to bias 127; it is exact, subnormals included.
    const uint32_t scaled = Bits(FromBits(magnitude << 13) * FromBits(0x77800000u));
    const uint32_t special = (magnitude << 13) | 0x7f800000u;  // infinities and NaNs
    return FromBits(sign | (magnitude >= 0x7c00u ? special : scaled));
  }
  static uint16_t Store(float v) {
    const uint32_t bits = Bits(v);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
    if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // rounds to infinity
    if (magnitude < 0x38800000u) {
      // Subnormal: adding 0.5 leaves the result's bits, rounded, at the end of the sum's significand.
      const float sum = FromBits(magnitude) + 0.5f;
      return static_cast<uint16_t>(sign | (Bits(sum) - 0x3f000000u));
    }
    const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u;
    return static_cast<uint16_t>(sign | (rounded >> 13));
  }
};

// Calls f with the element's tag; false for a type without arithmetic.
template <class F>
bool WithElement(ElementType type, F f) {
  switch (type) {
    case ElementType::kF32:
      f(F32{});
      return true;
    case ElementType::kF16:
      f(F16{});
      return true;
    case ElementType::kBF16:
      f(BF16{});
      return true;
    case ElementType::kOther:
      break;
  }
  return false;
}

// sum[i] = row[i] * scale: a sum starts from its first row, so that -0.0 and NaN survive.
template <class E>
void StartSum(float* sum, const void* row, int64_t n, float scale) {
  const auto* in = static_cast<const typename E::Storage*>(row);
  for (int64_t i = 0; i < n; ++i) sum[i] = E::Load(in[i]) * scale;
}

template <class E>
void AddRow(float* sum, const void* row, int64_t n, float scale) {
  const auto* in = static_cast<const typename E::Storage*>(row);
  for (int64_t i = 0; i < n; ++i) {
    const float product = E::Load(in[i]) * scale;
    sum[i] = sum[i] + product;
  }
}

template <class E>
void StoreSum(void* row, const float* sum, int64_t n) {
  auto* out = static_cast<typename E::Storage*>(row);
  for (int64_t i = 0; i < n; ++i) out[i] = E::Store(sum[i]);
}

}  // namespace moonep

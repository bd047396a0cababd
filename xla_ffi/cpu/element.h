// Elements of rows, and how each is widened to float32 and rounded back (to nearest, ties to even). No branches: loops
// over them become vector code.
#pragma once

#include <cstdint>
#include <cstring>

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
    const int32_t magnitude = static_cast<int32_t>(bits & 0x7fffffffu);  // vector units compare signed numbers
    return static_cast<uint16_t>(magnitude > 0x7f800000 ? quiet_nan : rounded);
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
    const uint32_t sign = (Bits(v) >> 16) & 0x8000u;
    const uint32_t magnitude = Bits(v) & 0x7fffffffu;
    const int32_t order = static_cast<int32_t>(magnitude);  // vector units compare signed numbers
    // Subnormal: adding 0.5 leaves the result's bits, rounded, at the end of the sum's significand.
    const uint32_t subnormal = Bits(FromBits(magnitude) + 0.5f) - 0x3f000000u;
    const uint32_t normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u) >> 13;
    const uint32_t finite = order < 0x38800000 ? subnormal : normal;
    const uint32_t rounded = order >= 0x477ff000 ? 0x7c00u : finite;  // infinity
    return static_cast<uint16_t>(sign | (order > 0x7f800000 ? 0x7e00u : rounded));
  }
};

}  // namespace moonep

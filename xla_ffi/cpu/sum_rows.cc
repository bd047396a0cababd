// SumRows, once for each vector unit that a machine may have. The module is built for any x86-64 or arm64, so on x86-64
// the widest unit is chosen at the first sum. All variants are compiled from one function and give the same bits.
#include "xla_ffi/cpu/sum_rows.h"

#include "xla_ffi/cpu/element.h"

namespace moonep {
namespace {

// A stretch of every row at a time: short enough for its sum to stay in the nearest cache, so that `to` is written
// once; long enough for the processor to see each row as a stream and fetch ahead.
constexpr int64_t kBlock = 256;

// Inlined with n known and unknown, so that whole blocks need no loop control.
template <class E>
[[gnu::always_inline]] inline void SumBlock(void* to, const Term* terms, int64_t count, int64_t at, int64_t n) {
  using Storage = typename E::Storage;
  float sum[kBlock];
  const Storage* row = static_cast<const Storage*>(terms[0].row) + at;
  const float first = terms[0].scale;
  for (int64_t i = 0; i < n; ++i) sum[i] = E::Load(row[i]) * first;
  for (int64_t t = 1; t < count; ++t) {
    row = static_cast<const Storage*>(terms[t].row) + at;
    const float scale = terms[t].scale;
    for (int64_t i = 0; i < n; ++i) {
      const float product = E::Load(row[i]) * scale;
      sum[i] = sum[i] + product;
    }
  }
  Storage* out = static_cast<Storage*>(to) + at;
  for (int64_t i = 0; i < n; ++i) out[i] = E::Store(sum[i]);
}

template <class E>
[[gnu::always_inline]] inline void Sum(void* to, const Term* terms, int64_t count, int64_t n) {
  int64_t at = 0;
  for (; at + kBlock <= n; at += kBlock) SumBlock<E>(to, terms, count, at, kBlock);
  if (at < n) SumBlock<E>(to, terms, count, at, n - at);
}

using Variant = void (*)(void* to, const Term* terms, int64_t count, int64_t n);

template <class E>
void SumPlain(void* to, const Term* terms, int64_t count, int64_t n) {
  Sum<E>(to, terms, count, n);
}

#if defined(__x86_64__)
template <class E>
[[gnu::target("avx2")]] void SumAvx2(void* to, const Term* terms, int64_t count, int64_t n) {
  Sum<E>(to, terms, count, n);
}

template <class E>
[[gnu::target("avx512f,avx512bw,avx512vl")]] void SumAvx512(void* to, const Term* terms, int64_t count, int64_t n) {
  Sum<E>(to, terms, count, n);
}
#endif

template <class E>
Variant Widest() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl")) return SumAvx512<E>;
  if (__builtin_cpu_supports("avx2")) return SumAvx2<E>;
#endif
  return SumPlain<E>;
}

}  // namespace

void SumRows(ElementType type, void* to, const Term* terms, int64_t count, int64_t n) {
  static const Variant f32 = Widest<F32>(), f16 = Widest<F16>(), bf16 = Widest<BF16>();
  switch (type) {
    case ElementType::kF32:
      return f32(to, terms, count, n);
    case ElementType::kF16:
      return f16(to, terms, count, n);
    case ElementType::kBF16:
      return bf16(to, terms, count, n);
    case ElementType::kOther:  // no arithmetic
      return;
  }
}

}  // namespace moonep

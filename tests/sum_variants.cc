// Sums random rows with every variant of SumRows that this machine can run, and compares each element's bits with the
// same sum of one element alone. Prints what it ran; tests/test_sums.py compiles it with the flags of the module.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "xla_ffi/cpu/sum_rows.cc"

namespace {

using moonep::Term;
using moonep::Variant;

template <class E>
void Check(const char* name, Variant sum) {
  using Storage = typename E::Storage;
  std::mt19937 random(1);
  for (int64_t n : {1, 7, 63, 255, 256, 257, 1024}) {
    for (int64_t count : {1, 2, 3, 9}) {
      std::vector<std::vector<Storage>> rows(static_cast<size_t>(count), std::vector<Storage>(static_cast<size_t>(n)));
      std::vector<Term> terms;
      for (auto& row : rows) {
        // Any bits in every second case: subnormals, infinities, NaN.
        for (auto& element : row) {
          const uint32_t bits = static_cast<uint32_t>(random());
          element = E::Store(static_cast<float>(bits) * 0x1p-31f - 1.0f);
          if (count % 2 == 1) std::memcpy(&element, &bits, sizeof element);
        }
        terms.push_back({row.data(), count == 2 ? 1.0f : static_cast<float>(random()) * 0x1p-30f - 2.0f});
      }
      std::vector<Storage> got(static_cast<size_t>(n));
      sum(got.data(), terms.data(), count, n);
      for (int64_t i = 0; i < n; ++i) {
        std::vector<Term> alone;
        for (const Term& t : terms) alone.push_back({static_cast<const Storage*>(t.row) + i, t.scale});
        Storage want;
        moonep::SumPlain<E>(&want, alone.data(), count, 1);
        // x86 keeps the NaN of either operand of a sum, as the compiler placed them: any of them is right.
        const float a = E::Load(got[static_cast<size_t>(i)]), b = E::Load(want);
        if (std::memcmp(&got[static_cast<size_t>(i)], &want, sizeof want) != 0 && !(a != a && b != b)) {
          std::printf("%s: element %d of %d, %d rows: got %a, want %a\n", name, static_cast<int>(i),
                      static_cast<int>(n), static_cast<int>(count), static_cast<double>(a), static_cast<double>(b));
          std::exit(1);
        }
      }
    }
  }
}

void CheckAll(const char* name, Variant f32, Variant f16, Variant bf16) {
  Check<moonep::F32>(name, f32);
  Check<moonep::F16>(name, f16);
  Check<moonep::BF16>(name, bf16);
  std::printf("%s\n", name);
}

}  // namespace

int main() {
  using namespace moonep;
  CheckAll("plain", SumPlain<F32>, SumPlain<F16>, SumPlain<BF16>);
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) CheckAll("avx2", SumAvx2<F32>, SumAvx2<F16>, SumAvx2<BF16>);
  if (Widest<F32>() == SumAvx512<F32>) CheckAll("avx512", SumAvx512<F32>, SumAvx512<F16>, SumAvx512<BF16>);
#endif
}

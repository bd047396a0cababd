// Sums of rows: elements are widened to float32, multiplied and added there in the order given, and rounded once.
#pragma once

#include <cstdint>

#include "xla_ffi/common/operands.h"

namespace moonep {

struct Term {
  const void* row;
  float scale;
};

// to[i] = terms[0].row[i] * scale + terms[1].row[i] * scale + ..., of n elements; at least one term. A sum starts from
// its first row, so that -0.0 and NaN survive. `to` may be one of the rows.
void SumRows(ElementType type, void* to, const Term* terms, int64_t count, int64_t n);

}  // namespace moonep

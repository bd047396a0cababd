// Words that error texts share.
#pragma once

#include <cstdint>
#include <sstream>
#include <string>
#include <vector>

#include "xla_ffi/cpu/control.h"

namespace moonep {

inline std::string List(const std::vector<int32_t>& ranks) {
  std::ostringstream out;
  out << "[";
  for (size_t i = 0; i < ranks.size(); ++i) out << (i ? ", " : "") << ranks[i];
  out << "]";
  return out.str();
}

inline std::string Describe(const CallKey& key) {
  std::ostringstream out;
  out << "ticket " << static_cast<int64_t>(key.ticket) << ", channel " << key.channel << ", site "
      << (key.site & 0xffffffffu);
  return out.str();
}

}  // namespace moonep

// Words that error texts share. Strings only: a C++ stream inside a Python module meets whatever locale and C++ library
// the process has.
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

namespace moonep {

// "[1, 2, 3]"
template <class Int>
std::string List(const std::vector<Int>& values) {
  std::string out = "[";
  for (size_t i = 0; i < values.size(); ++i) out += (i ? ", " : "") + std::to_string(values[i]);
  return out + "]";
}

inline std::string Seconds(int64_t ns) {
  char text[32];
  std::snprintf(text, sizeof(text), "%g s", static_cast<double>(ns) * 1e-9);
  return text;
}

// A peer left; why, its own output says.
inline std::string ClosedByPeer(const std::string& op, const std::string& missing, const std::string& culprits) {
  return op + "missing ranks " + missing + ": " + culprits +
         " has closed the domain; got a call after its close(), or after an exception took it out of the domain's with "
         "block, expected none; look at what it printed first; close() is collective: call it after the last step on "
         "every rank";
}

// An op got a plan that is none: its ticket says so.
inline std::string PoisonedPlan(const std::string& op, int32_t ticket, const std::string& rank) {
  return op + ": the plan is poisoned; got ticket " + std::to_string(ticket) + " on " + rank +
         ", expected that of a call of plan that succeeded; use a Plan as plan or dispatch returned it, on every rank";
}

}  // namespace moonep

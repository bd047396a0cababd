// DomainShape in Python, for the module of either backend: made from static numbers, asked for rows and bytes.
#pragma once

#include <nanobind/nanobind.h>

#include "xla_ffi/core/layout.h"

namespace moonep {

// layout_of(shape) is the backend's layout of a chunk, with the offset of each part.
template <class LayoutOf>
void BindDomainShape(nanobind::module_& m, LayoutOf layout_of) {
  namespace nb = nanobind;
  nb::class_<DomainShape>(m, "DomainShape")
      .def(
          "__init__",
          [](DomainShape* self, int32_t ranks, int32_t experts, int32_t topk, int32_t tokens, int32_t padding,
             bool home, bool exact, int32_t hidden, int32_t row_bytes, int64_t stage_bytes) {
            new (self) DomainShape{ranks, experts, topk, tokens, padding, home, exact, hidden, row_bytes, stage_bytes};
          },
          nb::kw_only(), nb::arg("ranks"), nb::arg("experts"), nb::arg("topk"), nb::arg("tokens"), nb::arg("padding"),
          nb::arg("home") = false, nb::arg("exact") = false, nb::arg("hidden") = 1, nb::arg("row_bytes") = 4,
          nb::arg("stage_bytes") = 0)
      .def("recv_rows", &DomainShape::recv_rows)
      .def("chunk_bytes", [layout_of](const DomainShape& shape) {
        const auto l = layout_of(shape);
        nb::dict d;
        d["control"] = l.ids;
        d["metadata"] = l.rows - l.ids + l.returns - l.weights + l.slots - l.return_weights;
        d["rows"] = l.weights - l.rows;
        d["returns"] = l.return_weights - l.returns;
        d["slots"] = l.bytes - l.slots;
        d["total"] = l.bytes;
        return d;
      });
}

}  // namespace moonep

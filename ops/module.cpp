// lowbit._C: introspection for Python. No torch, no operators.

#include <pybind11/pybind11.h>

#include <stdexcept>
#include <string>

#include "../kernels/format.h"
#include "../kernels/registry.h"

namespace py = pybind11;
using namespace lowbit;

namespace {

py::list names_of(IsaBits bits) {
  py::list names;
  size_t count;
  const IsaName* all = isa_names(&count);
  for (size_t i = 0; i < count; ++i) {
    if ((all[i].bit & ~bits) == 0) names.append(all[i].name);
  }
  return names;
}

std::string name_of_isa(IsaBits bit) {
  size_t count;
  const IsaName* all = isa_names(&count);
  for (size_t i = 0; i < count; ++i) {
    if (all[i].bit == bit) return all[i].name;
  }
  return "portable";
}

py::dict describe(const char* family, const char* name, IsaBits isa) {
  py::dict row;
  row["name"] = name;
  row["family"] = family;
  row["isa"] = name_of_isa(isa);
  row["supported"] = (isa & ~cpu_isa()) == 0;
  row["enabled"] = (isa & ~active_isa()) == 0;
  return row;
}

// Every row of the table. `active`: some call would run it under the current ISA cap.
py::list kernels() {
  py::list rows;
  const IsaBits isa = active_isa();
  for (size_t i = 0; i < linear_kernel_count(); ++i) {
    const LinearKernel& kernel = linear_kernel(i);
    py::dict row = describe("linear", kernel.name, kernel.isa);
    row["bits"] = int{kernel.bits};
    row["tile"] = py::make_tuple(int{kernel.m_step}, int{kernel.n_step});
    row["active"] = &choose_linear(kernel.format, kernel.bits, kernel.m_step, isa) == &kernel;
    rows.append(row);
  }
  for (size_t i = 0; i < embedding_kernel_count(); ++i) {
    const EmbeddingKernel& kernel = embedding_kernel(i);
    py::dict row = describe("embedding", kernel.name, kernel.isa);
    row["bits"] = int{kernel.bits};
    row["active"] = &choose_embedding(kernel.format, kernel.bits, isa) == &kernel;
    rows.append(row);
  }
  for (size_t i = 0; i < quantize_kernel_count(); ++i) {
    const QuantizeKernel& kernel = quantize_kernel(i);
    py::dict row = describe("quantize", kernel.name, kernel.isa);
    row["active"] = &choose_quantize(isa) == &kernel;
    rows.append(row);
  }
  return rows;
}

py::dict isa() {
  py::dict result;
  result["cpu"] = names_of(cpu_isa());
  result["cap"] = isa_cap() == nullptr ? py::object(py::none()) : py::object(py::str(isa_cap()));
  result["active"] = names_of(active_isa());
  return result;
}

void raise_unless_ok(const Status& status) {
  if (!status.ok()) throw py::value_error(status.message());
}

py::dict as_dict(const Layout& layout) {
  py::dict result;
  result["version"] = kFormatVersion;
  result["bits"] = layout.bits;
  result["mapping"] = layout.mapping == Mapping::affine ? "affine" : "symmetric";
  result["out_features"] = layout.n;
  result["in_features"] = layout.k;
  result["group_size"] = layout.group_size == 0 ? py::object(py::none()) : py::object(py::int_(layout.group_size));
  result["groups"] = layout.groups;
  result["has_bias"] = layout.has_bias;
  result["total_bytes"] = layout.total_bytes;
  return result;
}

// What the header of `size` bytes at `address` says; with `verify`, after checking all bytes against the checksum.
// The caller keeps the memory alive.
py::dict info(uintptr_t address, int64_t size, bool verify) {
  Layout layout;
  const void* data = reinterpret_cast<const void*>(address);
  raise_unless_ok(read_header(data, size, &layout));
  if (verify) {
    Status status;
    {
      py::gil_scoped_release release;
      status = verify_payload(data, layout);
    }
    raise_unless_ok(status);
  }
  return as_dict(layout);
}

int64_t packed_bytes(int64_t n, int64_t k, int bits, int64_t group_size, bool affine, bool has_bias) {
  Layout layout;
  raise_unless_ok(
      make_layout(n, k, bits, group_size, affine ? Mapping::affine : Mapping::symmetric, has_bias, &layout));
  return layout.total_bytes;
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  if (const Status status = isa_cap_status(); !status.ok()) throw py::import_error(status.message());
  module.def("kernels", &kernels);
  module.def("isa", &isa);
  module.def("info", &info, py::arg("address"), py::arg("size"), py::arg("verify"));
  module.def("packed_bytes", &packed_bytes, py::arg("n"), py::arg("k"), py::arg("bits"), py::arg("group_size"),
             py::arg("affine"), py::arg("has_bias"));
  module.attr("executorch_version") = LOWBIT_EXECUTORCH_VERSION;  // that lowbit_executorch was built with, or empty
}

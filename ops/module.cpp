// lowbit._C: introspection for Python, without torch and operators.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>
#include <iterator>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "../kernels/format.h"
#include "../kernels/registry.h"
#include "check.h"
#include "load_kernels.h"
#include "nodes.h"
#include "operators.h"
#include "read_bandwidth.h"

namespace py = pybind11;
using namespace lowbit;

void add_plans(py::module_& module);  // ../plan/module.cpp
void add_tokenizers(py::module_& module);  // ../runner/module.cpp

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

// The name of a kernel's bits, or several names for a vendor's kernel that needs several extensions.
std::string name_of_isa(IsaBits bits) {
  size_t count;
  const IsaName* all = isa_names(&count);
  std::string names;
  for (size_t i = 0; i < count; ++i) {
    if ((all[i].bit & bits) != 0) names += (names.empty() ? "" : "+") + std::string(all[i].name);
  }
  return names.empty() ? "portable" : names;
}

template <class Kernel>
py::dict describe(const char* family, const Kernel& kernel) {
  const LoadedLibrary* const loaded = library_of(&kernel);
  py::dict row;
  row["name"] = kernel.name;
  row["family"] = family;
  row["isa"] = name_of_isa(kernel.isa);
  row["supported"] = (kernel.isa & ~cpu_isa()) == 0;
  row["enabled"] = (kernel.isa & ~active_isa()) == 0;
  row["vendor"] = loaded == nullptr ? py::object(py::none()) : py::object(py::str(loaded->library->vendor));
  row["library"] = py::none();
  if (loaded != nullptr) row["library"] = py::module_::import("os").attr("fsdecode")(py::bytes(loaded->path));
  return row;
}

// Outputs and inputs of layers in published models. Only kernels with supports() need more than the first.
constexpr int64_t kShapes[][2] = {
    {4096, 4096},  {64, 64},      {384, 384},    {1536, 384},   {384, 1536},   {768, 768},    {3072, 768},
    {768, 3072},   {896, 896},    {4864, 896},   {896, 4864},   {1024, 1024},  {3072, 1024},  {1024, 3072},
    {2048, 2048},  {8192, 2048},  {2048, 8192},  {3072, 3072},  {8192, 3072},  {3072, 8192},  {1024, 4096},
    {14336, 4096}, {4096, 14336}, {11008, 4096}, {4096, 11008}, {5120, 5120},  {13824, 5120}, {5120, 13824},
    {8192, 8192},  {28672, 8192}, {8192, 28672}, {32000, 4096}, {128256, 4096}, {151936, 1024}};

bool some_row_asks_for_sizes() {
  for (size_t i = 0; i < linear_kernel_count(); ++i) {
    if (linear_kernel(i).supports != nullptr) return true;
  }
  return false;
}

// Calls `use` with a layout of every mapping and several group sizes, for each of the first `shapes` sizes.
template <class Use>
void for_layouts(int bits, Format format, size_t shapes, const Use& use) {
  for (size_t shape = 0; shape < shapes; ++shape) {
    for (const Mapping mapping : kMappings) {
      for (const int64_t group_size : {32, 16, 64, 128, 0}) {
        const int8_t levels[kMostLevels] = {};
        Layout layout;
        const Status status = make_layout(kShapes[shape][0], kShapes[shape][1], bits, group_size, mapping, false, &layout,
                                          has_table(mapping) ? levels : nullptr);
        layout.format = format;
        if (status.ok()) use(layout);
      }
    }
  }
}

// The linear kernels that run in calls of 1 to 1024 rows of activations. A tile has at most 255 rows, so beyond 256 rows the
// choice depends only on supports().
std::set<const LinearKernel*> active_linear(IsaBits isa) {
  std::set<std::pair<int, Format>> kinds;
  for (size_t i = 0; i < linear_kernel_count(); ++i) kinds.emplace(linear_kernel(i).bits, linear_kernel(i).format);
  const size_t shapes = some_row_asks_for_sizes() ? std::size(kShapes) : 1;
  std::set<const LinearKernel*> active;
  for (const auto& [bits, format] : kinds) {
    for_layouts(bits, format, shapes, [&](const Layout& layout) {
      for (int64_t m = 1; m <= 1024; m += m < 256 ? 1 : 256) active.insert(&choose_linear(layout, m, isa, streams()));
    });
  }
  return active;
}

bool is_active(const EmbeddingKernel& kernel, IsaBits isa) {
  bool active = false;
  for_layouts(kernel.bits, kernel.format, 1,
              [&](const Layout& layout) { active = active || &choose_embedding(layout, isa) == &kernel; });
  return active;
}

// All kernels of the table. `active`: whether a call described above would run it under the current ISA cap.
py::list kernels() {
  py::list rows;
  const IsaBits isa = active_isa();
  const std::set<const LinearKernel*> active = active_linear(isa);
  for (size_t i = 0; i < linear_kernel_count(); ++i) {
    const LinearKernel& kernel = linear_kernel(i);
    py::dict row = describe("linear", kernel);
    row["format"] = name_of(kernel.format).text;
    row["bits"] = int{kernel.bits};
    row["tile"] = py::make_tuple(int{kernel.m_least}, int{kernel.n_step});
    row["active"] = active.count(&kernel) != 0;
    rows.append(row);
  }
  for (size_t i = 0; i < embedding_kernel_count(); ++i) {
    const EmbeddingKernel& kernel = embedding_kernel(i);
    py::dict row = describe("embedding", kernel);
    row["format"] = name_of(kernel.format).text;
    row["bits"] = int{kernel.bits};
    row["active"] = is_active(kernel, isa);
    rows.append(row);
  }
  for (size_t i = 0; i < quantize_kernel_count(); ++i) {
    const QuantizeKernel& kernel = quantize_kernel(i);
    py::dict row = describe("quantize", kernel);
    row["active"] = &choose_quantize(isa) == &kernel;
    rows.append(row);
  }
  for (size_t i = 0; i < attention_kernel_count(); ++i) {
    const AttentionKernel& kernel = attention_kernel(i);
    py::dict row = describe("attention", kernel);
    row["active"] = &choose_attention(isa) == &kernel;
    rows.append(row);
  }
  for (size_t i = 0; i < recurrence_kernel_count(); ++i) {
    const RecurrenceKernel& kernel = recurrence_kernel(i);
    py::dict row = describe("recurrence", kernel);
    row["active"] = &choose_recurrence(isa) == &kernel;
    rows.append(row);
  }
  for (size_t i = 0; i < elementwise_kernel_count(); ++i) {
    const ElementwiseKernel& kernel = elementwise_kernel(i);
    py::dict row = describe("elementwise", kernel);
    row["active"] = &choose_elementwise(isa) == &kernel;
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

// How one row reads its weights. `pin` changes it from now on.
const char* streams_as(const std::optional<std::string>& pin) {
  if (pin.has_value()) {
    Streams wanted;
    if (!streams_named(pin->c_str(), &wanted)) throw py::value_error("pin is '" + *pin + "'; expected one, ahead or several");
    pin_streams(wanted);
  }
  return kStreamsNames[static_cast<int>(streams())];
}

void raise_unless_ok(const Status& status) {
  switch (status.kind()) {
    case Status::Kind::ok: return;
    case Status::Kind::no_memory: throw std::bad_alloc();
    case Status::Kind::system: PyErr_SetString(PyExc_OSError, status.message()); throw py::error_already_set();
    default: throw py::value_error(status.message());
  }
}

py::dict as_dict(const Layout& layout) {
  py::dict result;
  const bool has_levels = has_table(layout.mapping);
  result["version"] = format_version(layout);
  result["format"] = name_of(layout.format).text;
  result["bits"] = layout.bits;
  result["mapping"] = name_of(layout.mapping);
  result["out_features"] = layout.n;
  result["in_features"] = layout.k;
  result["group_size"] = layout.group_size == 0 ? py::object(py::none()) : py::object(py::int_(layout.group_size));
  result["groups"] = layout.groups;
  result["has_bias"] = layout.has_bias;
  result["rotated_inputs"] = layout.rotated_inputs();
  result["activation_bits"] = layout.activation_bits();
  result["total_bytes"] = layout.total_bytes;
  result["levels"] = py::none();
  if (has_levels) {
    py::tuple levels(size_t{1} << layout.bits);
    for (size_t i = 0; i < levels.size(); ++i) levels[i] = int{layout.levels[i]};
    result["levels"] = levels;
  }
  return result;
}

// The contents of the header at `address`, a packed weight of `size` bytes. `verify`: checks all bytes against the checksum.
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

// A table of int8 levels, one per code.
using Levels = std::optional<std::string>;

Layout layout_of(int64_t n, int64_t k, int bits, int64_t group_size, bool affine, bool has_bias, const Levels& table,
                 int64_t rotated_inputs, int64_t activation_bits) {
  int8_t levels[kMostLevels] = {};
  if (table.has_value()) {
    if (can_have_levels(bits) && table->size() != size_t{1} << bits) {
      throw py::value_error("there are " + std::to_string(table->size()) + " levels; expected " +
                            std::to_string(1 << bits));
    }
    std::memcpy(levels, table->data(), table->size() < sizeof levels ? table->size() : sizeof levels);
  }
  Layout layout;
  const Mapping mapping = mapping_with(affine, table.has_value());
  raise_unless_ok(
      make_layout(n, k, bits, group_size, mapping, has_bias, &layout, table.has_value() ? levels : nullptr));
  raise_unless_ok(set_rotation(rotated_inputs, &layout));
  raise_unless_ok(set_activation_bits(activation_bits, &layout));
  return layout;
}

// The result of info() for such a matrix.
py::dict describe_packed(int64_t n, int64_t k, int bits, int64_t group_size, bool affine, bool has_bias,
                         const Levels& levels, int64_t rotated_inputs, int64_t activation_bits) {
  return as_dict(layout_of(n, k, bits, group_size, affine, has_bias, levels, rotated_inputs, activation_bits));
}

int64_t packed_bytes(int64_t n, int64_t k, int bits, int64_t group_size, bool affine, bool has_bias,
                     const Levels& levels) {
  return layout_of(n, k, bits, group_size, affine, has_bias, levels, 0, 8).total_bytes;
}

// For a matrix that is packed in bands of whole panels: combine the checksum of each band (a packed weight of its own) with
// those of the earlier bands, then put the header of packed_header() before the panels of all bands.
uint64_t fold_bands(uintptr_t address, int64_t size, uint64_t folded) {
  Layout layout;
  const void* data = reinterpret_cast<const void*>(address);
  raise_unless_ok(read_header(data, size, &layout));
  if (layout.format != Format::panel16) throw py::value_error("only format panel16 has panels");
  py::gil_scoped_release release;
  return fold_panels(data, layout, folded);
}

py::bytes packed_header(int64_t n, int64_t k, int bits, int64_t group_size, bool affine, bool has_bias,
                        uint64_t folded, const Levels& levels, int64_t rotated_inputs, int64_t activation_bits) {
  char header[kLevelsHeaderBytes];
  const Layout layout = layout_of(n, k, bits, group_size, affine, has_bias, levels, rotated_inputs, activation_bits);
  write_header(layout, folded, header);
  return py::bytes(header, static_cast<size_t>(layout.header_bytes));
}

TensorView bytes_view(uintptr_t address, int64_t size) {
  TensorView view;
  view.data = reinterpret_cast<void*>(address);
  view.type = ElementType::u8;
  view.shape = {1, {size}};
  view.stride[0] = 1;
  return view;
}

// Changes the header at `address`. The caller keeps the memory alive.
void set_activation_bits_of(uintptr_t address, int64_t size, int64_t bits) {
  raise_unless_ok(set_activation_bits(bytes_view(address, size), bits));
}

int64_t repacked_bytes(uintptr_t address, int64_t size, const std::string& format) {
  Layout layout;
  raise_unless_ok(repack_shape(bytes_view(address, size), format.c_str(), &layout));
  return layout.total_bytes;
}

// Writes `out_size` bytes at `out_address`. The caller keeps both memories alive.
void repack_into(uintptr_t address, int64_t size, const std::string& format, uintptr_t out_address, int64_t out_size) {
  Status status;
  {
    py::gil_scoped_release release;
    status = repack(bytes_view(address, size), format.c_str(), bytes_view(out_address, out_size), {});
  }
  raise_unless_ok(status);
}

// Addresses and sizes of packed matrices.
using Matrices = std::vector<std::pair<uintptr_t, int64_t>>;

std::vector<TensorView> views_of(const Matrices& matrices) {
  std::vector<TensorView> views;
  for (const auto& [address, size] : matrices) views.push_back(bytes_view(address, size));
  return views;
}

int64_t spliced_bytes(const Matrices& matrices, int dim, int64_t begin, int64_t end) {
  const std::vector<TensorView> views = views_of(matrices);
  Layout layout;
  raise_unless_ok(splice_shape(views.data(), static_cast<int64_t>(views.size()), dim, begin, end, &layout));
  return layout.total_bytes;
}

// Writes `out_size` bytes at `out_address`. The caller keeps all memories alive.
void splice_into(const Matrices& matrices, int dim, int64_t begin, int64_t end, uintptr_t out_address,
                 int64_t out_size) {
  const std::vector<TensorView> views = views_of(matrices);
  Status status;
  {
    py::gil_scoped_release release;
    status = splice(views.data(), static_cast<int64_t>(views.size()), dim, begin, end, bytes_view(out_address, out_size),
                    {});
  }
  raise_unless_ok(status);
}

// The largest number of bytes per second in one pass over `size` bytes, for each number of streams.
double measure_read_bandwidth(uintptr_t address, int64_t size, int threads) {
  if (threads < 1 || size < (int64_t{1} << 20) * threads) {
    throw py::value_error("read_bandwidth needs a thread or more, and a MiB for each");
  }
  try {
    py::gil_scoped_release release;
    return read_bandwidth(reinterpret_cast<const uint8_t*>(address), size, threads, 1).bytes_per_second;
  } catch (const std::system_error& error) {
    raise_unless_ok(Status::system("%d threads cannot be started: %s", threads, error.what()));
  }
  return 0.0;  // never reached
}

// The CPUs of each memory node, and the value of LOWBIT_NUMA.
py::tuple memory_placement() {
  raise_unless_ok(placement_status());
  const Nodes& nodes = memory_nodes();
  py::list cpus;
  for (int node = 0; node < nodes.count; ++node) {
    py::list of_node;
    for (int cpu = 0; cpu < Nodes::kMostCpus; ++cpu) {
      if (nodes.of_cpu[cpu] == node) of_node.append(cpu);
    }
    cpus.append(of_node);
  }
  constexpr const char* kNames[] = {"local", "interleave", "off"};
  return py::make_tuple(kNames[static_cast<int>(placement())], cpus);
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  if (const Status status = isa_cap_status(); !status.ok()) throw py::import_error(status.message());
  module.def("kernels", &kernels);
  module.def("isa", &isa);
  module.def("streams", &streams_as, py::arg("pin") = py::none());
  module.def("info", &info, py::arg("address"), py::arg("size"), py::arg("verify"));
  module.def("packed_bytes", &packed_bytes, py::arg("n"), py::arg("k"), py::arg("bits"), py::arg("group_size"),
             py::arg("affine"), py::arg("has_bias"), py::arg("levels") = py::none());
  module.def("describe_packed", &describe_packed, py::arg("n"), py::arg("k"), py::arg("bits"), py::arg("group_size"),
             py::arg("affine"), py::arg("has_bias"), py::arg("levels") = py::none(), py::arg("rotated_inputs") = 0,
             py::arg("activation_bits") = 8);
  module.def("fold_panels", &fold_bands, py::arg("address"), py::arg("size"), py::arg("folded"));
  module.def("packed_header", &packed_header, py::arg("n"), py::arg("k"), py::arg("bits"), py::arg("group_size"),
             py::arg("affine"), py::arg("has_bias"), py::arg("folded"), py::arg("levels") = py::none(),
             py::arg("rotated_inputs") = 0, py::arg("activation_bits") = 8);
  module.def("set_activation_bits", &set_activation_bits_of, py::arg("address"), py::arg("size"), py::arg("bits"));
  module.def("repacked_bytes", &repacked_bytes, py::arg("address"), py::arg("size"), py::arg("format"));
  module.def("repack", &repack_into, py::arg("address"), py::arg("size"), py::arg("format"), py::arg("out_address"),
             py::arg("out_size"));
  module.def("spliced_bytes", &spliced_bytes, py::arg("matrices"), py::arg("dim"), py::arg("begin"), py::arg("end"));
  module.def("splice", &splice_into, py::arg("matrices"), py::arg("dim"), py::arg("begin"), py::arg("end"),
             py::arg("out_address"), py::arg("out_size"));
  module.def("read_bandwidth", &measure_read_bandwidth, py::arg("address"), py::arg("size"), py::arg("threads"));
  module.def("memory_placement", &memory_placement);
  module.def("load_kernels", [](const std::string& path) { raise_unless_ok(load_kernels(path.c_str())); },
             py::arg("path"));
  add_plans(module);
  add_tokenizers(module);
#if defined(__clang__)
  module.attr("compiler") = "Clang " __clang_version__;
#elif defined(__GNUC__)
  module.attr("compiler") = "GCC " __VERSION__;
#else
  module.attr("compiler") = "unknown";
#endif
  module.attr("executorch_version") = LOWBIT_EXECUTORCH_VERSION;  // the version for which lowbit_executorch was built, or empty
}

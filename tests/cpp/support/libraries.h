// For tests of kernel libraries: their paths, the number of kernels, and a kernel by name.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "../../../kernels/pack.h"
#include "../../../kernels/registry.h"
#include "build.h"
#include "tensors.h"

namespace lowbit::test {

inline std::string path_of(const char* library) { return std::string(kTestLibraries) + library + ".so"; }

inline size_t rows() {
  return linear_kernel_count() + embedding_kernel_count() + quantize_kernel_count() +
         attention_kernel_count();
}

inline const LinearKernel& choose_linear_of(int bits, int64_t m, IsaBits isa) {
  return choose_linear(layout_of(16, 64, bits, 32, Mapping::symmetric, false), m, isa);
}

// A correct function for kernels of any width; incorrect ones are refused.
inline void right_linear(const LinearArgs& args) { portable_linear(args.layout.bits).run(args); }

// A format that is panel16 under another name, and a function for its linear kernels.
inline Layout panel16_of(const Layout& own) {
  return layout_of(own.n, own.k, own.bits, own.group_size, own.mapping, own.has_bias);
}
inline int64_t panel16_bytes(const void*, const Layout& own) { return panel16_of(own).total_bytes; }
inline const char* pack_panel16(const void*, const Layout& own, const PackArgs& args, int64_t, int64_t, void* bytes) {
  const Layout layout = panel16_of(own);
  std::vector<uint8_t> whole(static_cast<size_t>(layout.total_bytes));
  std::vector<uint64_t> checksums(static_cast<size_t>(layout.panels));
  if (!pack_panels(layout, args, 0, layout.panels, whole.data(), checksums.data()).ok()) return "it is wrong";
  std::memcpy(bytes, whole.data() + layout.header_bytes, whole.size() - static_cast<size_t>(layout.header_bytes));
  return nullptr;
}
inline void linear_of_panel16(const LinearArgs& args) {
  LinearArgs same = args;
  same.layout = panel16_of(args.layout);
  portable_linear(args.layout.bits).run(same);
}

// For formats with bytes that are never read.
inline const char* pack_nothing(const void*, const Layout&, const PackArgs&, int64_t, int64_t, void*) { return nullptr; }

inline const LinearKernel& named(const char* name) {
  for (size_t i = 0; i < linear_kernel_count(); ++i) {
    if (std::strcmp(linear_kernel(i).name, name) == 0) return linear_kernel(i);
  }
  ADD_FAILURE() << "there is no row " << name;
  return linear_kernel(0);
}

}  // namespace lowbit::test

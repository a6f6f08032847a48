// What the tests of kernel libraries ask: where they are, how many rows there are, which row has a name.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <string>

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

// A function for rows of any width that are right: others are refused.
inline void right_linear(const LinearArgs& args) { portable_linear(args.layout.bits).run(args); }

// For formats whose bytes are never read, and those that hold nothing.
inline const char* pack_nothing(const void*, const Layout&, const PackArgs&, int64_t, int64_t, void*) { return nullptr; }
inline const char* refuse_to_pack(const void*, const Layout&, const PackArgs&, int64_t, int64_t, void*) { return ""; }

inline const LinearKernel& named(const char* name) {
  for (size_t i = 0; i < linear_kernel_count(); ++i) {
    if (std::strcmp(linear_kernel(i).name, name) == 0) return linear_kernel(i);
  }
  ADD_FAILURE() << "there is no row " << name;
  return linear_kernel(0);
}

}  // namespace lowbit::test

// Which kernels of the tables a run must exercise, and whether it did.
//
// LOWBIT_TEST_ISA=<name>         only the kernels of this ISA (one ctest entry per ISA and family)
// LOWBIT_TEST_FAMILY=linear      only the kernels of this family: quantize, linear, embedding, attention, recurrence or
//                                elementwise
// LOWBIT_TEST_KERNELS=<path>     only the panel16 kernels of this kernel library
// LOWBIT_REQUIRE_ISA=<name>,...  these must run; a CPU that lacks one, or a build without kernels for it, is a failure
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "../../../kernels/registry.h"

namespace lowbit::test {

// A kernel of any of the tables.
struct RowRef {
  std::string name;
  IsaBits isa;
  size_t index;  // in its table

  bool supported() const { return (isa & ~cpu_isa()) == 0; }
};

std::vector<RowRef> quantize_rows();
std::vector<RowRef> linear_rows();
std::vector<RowRef> embedding_rows();
std::vector<RowRef> attention_rows();
std::vector<RowRef> recurrence_rows();
std::vector<RowRef> elementwise_rows();

// Tests that run a kernel must call this.
void note_exercised(const std::string& name);

inline std::string test_name(const testing::TestParamInfo<RowRef>& info) { return info.param.name; }
inline void PrintTo(const RowRef& row, std::ostream* out) { *out << row.name; }

std::string isa_name(IsaBits bits);

// Call before InitGoogleTest(), which lists the kernels. Prints the reason and returns false if a library does not load.
bool load_test_kernels();

// Call after RUN_ALL_TESTS(): the process's exit code. 77 (ctest: skipped) if this CPU or build has none of the requested
// kernels.
int finish(int test_result);

}  // namespace lowbit::test

// The first line of every test of a kernel.
#define LOWBIT_SKIP_UNLESS_SUPPORTED(row) \
  if (!(row).supported()) GTEST_SKIP() << (row).name << ": this CPU lacks " << ::lowbit::test::isa_name((row).isa)

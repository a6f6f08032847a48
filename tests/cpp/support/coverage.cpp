#include "coverage.h"

#include <cstdio>
#include <cstdlib>
#include <set>
#include <sstream>

#include "../../../ops/load_kernels.h"

namespace lowbit::test {
namespace {

std::set<std::string>& exercised() {
  static std::set<std::string> names;
  return names;
}

const char* setting(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr ? value : "";
}

const IsaName* find_isa(const std::string& name) {
  size_t count;
  const IsaName* names = isa_names(&count);
  for (size_t i = 0; i < count; ++i) {
    if (name == names[i].name) return names + i;
  }
  return nullptr;
}

bool selected(IsaBits isa) {
  const std::string wanted = setting("LOWBIT_TEST_ISA");
  return wanted.empty() || isa_name(isa) == wanted;
}

// A library's own formats have separate tests.
bool is_panel16(const QuantizeKernel&) { return true; }
bool is_panel16(const AttentionKernel&) { return true; }
bool is_panel16(const RecurrenceKernel&) { return true; }
bool is_panel16(const ElementwiseKernel&) { return true; }
template <class Row>
bool is_panel16(const Row& row) {
  return row.format == Format::panel16;
}

bool family_selected(const std::string& family) {
  const std::string wanted = setting("LOWBIT_TEST_FAMILY");
  return wanted.empty() || wanted == family;
}

template <class Row>
std::vector<RowRef> rows_of(const char* family, size_t count, const Row& row) {
  std::vector<RowRef> rows;
  if (!family_selected(family)) return rows;
  for (size_t i = 0; i < count; ++i) {
    const bool of_library = library_of(&row(i)) != nullptr;
    if (of_library != (setting("LOWBIT_TEST_KERNELS")[0] != '\0') || !is_panel16(row(i))) continue;
    if (selected(row(i).isa)) rows.push_back({row(i).name, row(i).isa, i});
  }
  return rows;
}

bool fail(const std::string& text) {
  std::fprintf(stderr, "coverage FAILED: %s\n", text.c_str());
  return false;
}

}  // namespace

std::string isa_name(IsaBits bits) {
  size_t count;
  const IsaName* names = isa_names(&count);
  for (size_t i = 0; i < count; ++i) {
    if (names[i].bit == bits) return names[i].name;
  }
  return "an ISA without a name";
}

std::vector<RowRef> quantize_rows() { return rows_of("quantize", quantize_kernel_count(), quantize_kernel); }
std::vector<RowRef> linear_rows() { return rows_of("linear", linear_kernel_count(), linear_kernel); }
std::vector<RowRef> embedding_rows() { return rows_of("embedding", embedding_kernel_count(), embedding_kernel); }
std::vector<RowRef> attention_rows() { return rows_of("attention", attention_kernel_count(), attention_kernel); }
std::vector<RowRef> recurrence_rows() { return rows_of("recurrence", recurrence_kernel_count(), recurrence_kernel); }
std::vector<RowRef> elementwise_rows() { return rows_of("elementwise", elementwise_kernel_count(), elementwise_kernel); }

void note_exercised(const std::string& name) { exercised().insert(name); }

bool load_test_kernels() {
  const char* path = setting("LOWBIT_TEST_KERNELS");
  if (path[0] == '\0') return true;
  const Status status = load_kernels(path);
  return status.ok() || fail(status.message());
}

int finish(int test_result) {
  bool good = test_result == 0;
  const std::string only = setting("LOWBIT_TEST_ISA");
  if (!only.empty() && find_isa(only) == nullptr) good = fail("LOWBIT_TEST_ISA is '" + only + "', not an ISA's name");
  const std::string family = setting("LOWBIT_TEST_FAMILY");
  if (!family.empty() && family != "quantize" && family != "linear" && family != "embedding" && family != "attention" &&
      family != "recurrence" && family != "elementwise") {
    good = fail("LOWBIT_TEST_FAMILY is '" + family +
                "'; expected quantize, linear, embedding, attention, recurrence or elementwise");
  }

  std::vector<RowRef> rows = quantize_rows();
  for (const auto& more : {linear_rows(), embedding_rows(), attention_rows(), recurrence_rows(), elementwise_rows()}) {
    rows.insert(rows.end(), more.begin(), more.end());
  }
  // With a filter on the command line, someone is looking at one test.
  if (testing::GTEST_FLAG(filter) == "*") {
    std::set<std::string> expected;
    for (const RowRef& row : rows) {
      if (row.supported()) expected.insert(row.name);
    }
    for (const std::string& name : expected) {
      if (!exercised().contains(name)) good = fail(name + " runs on this CPU but no test exercised it");
    }
    for (const std::string& name : exercised()) {
      if (!expected.contains(name)) good = fail(name + " was exercised but is not a supported row");
    }
    std::fprintf(stderr, "exercised %zu of %zu rows\n", exercised().size(), rows.size());
  }

  std::stringstream required(setting("LOWBIT_REQUIRE_ISA"));
  for (std::string name; std::getline(required, name, ',');) {
    const IsaName* isa = find_isa(name);
    if (isa == nullptr) {
      good = fail("LOWBIT_REQUIRE_ISA names '" + name + "', which is no ISA of this processor");
    } else if ((isa->bit & ~cpu_isa()) != 0) {
      good = fail("LOWBIT_REQUIRE_ISA names '" + name + "', which this CPU lacks");
    } else if (only.empty() || only == name) {
      bool any = false;
      for (const RowRef& row : rows) any = any || (row.isa == isa->bit && exercised().contains(row.name));
      // An ISA need not have kernels of every family, but each has linear ones.
      if (!any && family_selected("linear")) {
        good = fail("LOWBIT_REQUIRE_ISA names '" + name + "', of which no row was exercised");
      }
    }
  }

  if (setting("LOWBIT_TEST_KERNELS")[0] != '\0' && exercised().empty()) {
    good = fail("no row of LOWBIT_TEST_KERNELS was exercised");
  }

  if (!good) return 1;
  return exercised().empty() && (!only.empty() || !family.empty()) ? 77 : 0;
}

}  // namespace lowbit::test

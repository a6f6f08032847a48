// How kernel libraries are found: by an absolute path, a relative path, or a name alone, all in UTF-8; also a library that
// another one in the same directory is linked with.

#include <gtest/gtest.h>

#include <chrono>
#include <filesystem>
#include <string>

#include "../../ops/load_kernels.h"
#include "support/libraries.h"
#include "support/tensors.h"

namespace lowbit::test {
namespace {

namespace fs = std::filesystem;

// In UTF-8 on every system, which `string()` is not on Windows.
std::string utf8(const fs::path& path) {
  const std::u8string text = path.u8string();
  return {text.begin(), text.end()};
}

class Paths : public testing::Test {
 protected:
  void SetUp() override {
    const auto now = std::chrono::steady_clock::now().time_since_epoch().count();
    directory_ =
      fs::absolute(fs::temp_directory_path() / ("lowbit-paths-" + std::to_string(now)) / u8"größer Ядро 重み");
    fs::create_directories(directory_ / u8"ß");
    before_ = fs::current_path();
    fs::current_path(directory_);
  }
  void TearDown() override {
    fs::current_path(before_);
    std::error_code kept;  // Windows removes no library that is loaded
    fs::remove_all(directory_.parent_path(), kept);
  }
  void copy(const char* library, const fs::path& to) { fs::copy_file(fs::path(path_of(library)), directory_ / to); }

  fs::path directory_, before_;
};

// The message of a refused library, which shows that its function was called.
void expect_called(const std::string& path) {
  EXPECT_TRUE(refused(load_kernels(path.c_str()), "'fault_linear' has 9 bits; expected 1 to 8"));
}

TEST_F(Paths, WholeOnes) {
  copy("fault_bad_bits", u8"ядро.so");
  copy("acme_kernels_c", u8"ß/é.so");
  expect_called(utf8(directory_ / u8"ядро.so"));
  const size_t before = rows();
  const std::string good = utf8(directory_ / u8"ß" / u8"é.so");
  const Status status = load_kernels(good.c_str());
  ASSERT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(rows(), before + 1);
  EXPECT_EQ(library_of(&named("acme_c_linear_a8w4"))->path, good);
}

TEST_F(Paths, FromTheCurrentDirectory) {
  copy("fault_bad_bits", u8"重み.so");
  copy("fault_bad_bits", u8"ß/重み.so");
  for (const fs::path path : {u8"重み.so", u8"./重み.so", u8"ß/重み.so", u8"ß/../ß/重み.so"}) expect_called(utf8(path));
  fs::current_path(directory_ / u8"ß");
  for (const fs::path path : {u8"重み.so", u8"../重み.so"}) expect_called(utf8(path));
  EXPECT_TRUE(refused(load_kernels(utf8(u8"ß/重み.so").c_str()), "does not load", Status::Kind::system));
}

// A library's dependencies are searched in its directory, not in the current directory.
TEST_F(Paths, WhatALibraryNeedsLiesBesideIt) {
  const std::string needs = utf8(directory_ / u8"ß" / "fault_needs_another.so");
  const size_t before = rows();
  copy("fault_needs_another", u8"ß/fault_needs_another.so");
  copy("another", "another.so");
  EXPECT_TRUE(refused(load_kernels(needs.c_str()), "does not load", Status::Kind::system));
  copy("another", u8"ß/another.so");
  EXPECT_TRUE(refused(load_kernels(needs.c_str()), "the vendor has no name"));
  EXPECT_EQ(rows(), before);
}

// A library truncated anywhere gives one sentence: the loader's, or what was missing.
TEST_F(Paths, LibrariesThatAreCut) {
  const size_t before = rows();
  const fs::path whole = path_of("fault_bad_bits");
  const uintmax_t bytes = fs::file_size(whole);
  int number = 0;
  for (const double share : {0.0, 0.001, 0.01, 0.1, 0.2}) {
    const fs::path cut = directory_ / ("cut" + std::to_string(number++) + ".so");
    fs::copy_file(whole, cut);
    fs::resize_file(cut, static_cast<uintmax_t>(static_cast<double>(bytes) * share));
    EXPECT_TRUE(refused(load_kernels(utf8(cut).c_str()), "does not load", Status::Kind::system)) << share;
  }
  EXPECT_TRUE(refused(load_kernels("\xff\xfe.so"), "does not load", Status::Kind::system));
  EXPECT_EQ(rows(), before);
}

}  // namespace
}  // namespace lowbit::test

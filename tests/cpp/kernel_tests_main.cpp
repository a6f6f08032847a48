#include <gtest/gtest.h>

#include "support/coverage.h"
#include "support/guarded.h"

int main(int argc, char** argv) {
  if (!lowbit::test::load_test_kernels()) return 1;
  testing::InitGoogleTest(&argc, argv);
  lowbit::test::install_crash_handler();
  return lowbit::test::finish(RUN_ALL_TESTS());
}

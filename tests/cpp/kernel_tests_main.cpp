#include <gtest/gtest.h>

#include "../../kernels/isa.h"
#include "../../kernels/vector_length.h"
#include "support/coverage.h"
#include "support/guarded.h"

int main(int argc, char** argv) {
  if (!lowbit::test::load_test_kernels()) return 1;
  testing::InitGoogleTest(&argc, argv);
  lowbit::test::install_crash_handler();
  const lowbit::LongVectors vectors((lowbit::cpu_isa() & lowbit::kSme2) != 0);  // as operators have them
  return lowbit::test::finish(RUN_ALL_TESTS());
}

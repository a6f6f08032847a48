// Small and large calls of every operator, with their inputs and expected bytes, for the tests of failed allocations and of
// many threads.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "../../../ops/operators.h"

namespace lowbit::test {

struct Call {
  std::string name;
  // Writes expected.size() bytes to `out`: all results, concatenated. Any number of threads may run it at once, each with its
  // own `out`.
  std::function<Status(const Parallel&, uint8_t* out)> run;
  std::vector<uint8_t> expected;
};

// The expected results are computed here on one thread; linear layers must have the bits of the portable kernels.
std::vector<Call> make_calls();

}  // namespace lowbit::test

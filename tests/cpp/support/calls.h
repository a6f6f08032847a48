// A call of every operator, small and large, with inputs of its own and the bytes that it must give: what the tests of
// failing memory and of many threads repeat.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "../../../ops/operators.h"

namespace lowbit::test {

struct Call {
  std::string name;
  // Writes expected.size() bytes to `out`: all results, one behind the other. Any number of threads may run it at
  // once, each with an `out` of its own.
  std::function<Status(const Parallel&, uint8_t* out)> run;
  std::vector<uint8_t> expected;
};

// What the calls give is computed here, on one thread; those of linear layers must have the bits of the portable rows.
std::vector<Call> make_calls();

}  // namespace lowbit::test

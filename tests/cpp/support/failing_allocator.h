// The allocator of a program that links this: the C library's, and any allocation can be made to fail.
#pragma once

#include <cstdint>

namespace lowbit::test {

// Allocation `number` from now on (0: the next one), on any thread, finds no memory; with `all_after` those behind it neither.
void fail_allocation(int64_t number, bool all_after);
void fail_no_allocation();

int64_t allocations();    // asked for since the program began
int64_t blocks_in_use();  // allocated and not freed

}  // namespace lowbit::test

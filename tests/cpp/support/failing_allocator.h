// Wraps the C library's allocator so that any allocation of the program can be made to fail.
#pragma once

#include <cstdint>

namespace lowbit::test {

// Makes allocation `number` from now on (0: the next one) fail, on any thread; with `all_after` also all later ones.
void fail_allocation(int64_t number, bool all_after);
void fail_no_allocation();

int64_t allocations();    // allocations since the program started
int64_t blocks_in_use();  // allocated and not freed

}  // namespace lowbit::test

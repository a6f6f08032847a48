// Marks memory as written or unwritten for MemorySanitizer. Does nothing in other builds.
#pragma once

#include <cstdint>

#if defined(__has_feature)
#if __has_feature(memory_sanitizer)
#define LOWBIT_TEST_WRITTEN
#include <sanitizer/msan_interface.h>
#endif
#endif

namespace lowbit::test {

// Marks these bytes as unwritten. They keep their values.
inline void forget([[maybe_unused]] const void* memory, [[maybe_unused]] int64_t bytes) {
#ifdef LOWBIT_TEST_WRITTEN
  __msan_poison(memory, static_cast<size_t>(bytes));
#endif
}

// Marks these bytes as written.
inline void accept([[maybe_unused]] const void* memory, [[maybe_unused]] int64_t bytes) {
#ifdef LOWBIT_TEST_WRITTEN
  __msan_unpoison(memory, static_cast<size_t>(bytes));
#endif
}

// Stops the test, and names the place, unless all of these bytes were written with initialized values.
inline void expect_written([[maybe_unused]] const void* memory, [[maybe_unused]] int64_t bytes) {
#ifdef LOWBIT_TEST_WRITTEN
  __msan_check_mem_is_initialized(memory, static_cast<size_t>(bytes));
#endif
}

}  // namespace lowbit::test

// Compiled without sanitizers, because their runtime allocates before it is initialized. Nothing here is shared with other
// files: atomics are compiler built-ins, not templates that another file may instantiate.
#include "failing_allocator.h"

#include <dlfcn.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <new>

namespace {

int64_t fuse = -1;  // inactive
int64_t asked = 0, in_use = 0;
bool fails_on = false;

bool burns() {
  __atomic_fetch_add(&asked, 1, __ATOMIC_SEQ_CST);
  if (__atomic_load_n(&fuse, __ATOMIC_SEQ_CST) < 0) return false;
  if (__atomic_fetch_sub(&fuse, 1, __ATOMIC_SEQ_CST) > 0) return false;
  if (__atomic_load_n(&fails_on, __ATOMIC_SEQ_CST)) __atomic_store_n(&fuse, 0, __ATOMIC_SEQ_CST);
  errno = ENOMEM;
  return true;
}

void* counted(void* memory) {
  if (memory != nullptr) __atomic_fetch_add(&in_use, 1, __ATOMIC_SEQ_CST);
  return memory;
}

// Memory for dlsym() while it looks up the allocator.
alignas(64) char first_bytes[4096];
size_t first_used = 0;

void* take_first(size_t bytes) {
  void* const taken = first_bytes + first_used;
  first_used += (bytes + 63) / 64 * 64;
  return first_used <= sizeof first_bytes ? taken : nullptr;
}

bool is_first(const void* memory) { return memory >= first_bytes && memory < first_bytes + sizeof first_bytes; }

// The C library's functions, or the sanitizer's.
struct Real {
  void* (*malloc)(size_t);
  void* (*calloc)(size_t, size_t);
  void* (*realloc)(void*, size_t);
  int (*posix_memalign)(void**, size_t, size_t);
  void (*free)(void*);
} real;

// False while they are being looked up.
bool found() {
  static int state = 0;
  if (state == 0) {
    state = 1;
    const auto find = [](auto& function, const char* name) {
      void* const symbol = dlsym(RTLD_NEXT, name);
      std::memcpy(&function, &symbol, sizeof symbol);
    };
    find(real.free, "free");
    find(real.malloc, "malloc");
    find(real.calloc, "calloc");
    find(real.realloc, "realloc");
    find(real.posix_memalign, "posix_memalign");
    state = 2;
  }
  return state == 2;
}

}  // namespace

#define EXPORTED __attribute__((visibility("default")))

extern "C" {

EXPORTED void* malloc(size_t bytes) {
  if (!found()) return take_first(bytes);
  return burns() ? nullptr : counted(real.malloc(bytes));
}

EXPORTED void* calloc(size_t count, size_t bytes) {
  if (!found()) return take_first(count * bytes);
  return burns() ? nullptr : counted(real.calloc(count, bytes));
}

EXPORTED void* realloc(void* memory, size_t bytes) {
  if (!found() || burns()) return nullptr;
  void* const moved = real.realloc(memory, bytes);
  return memory == nullptr ? counted(moved) : moved;
}

EXPORTED int posix_memalign(void** memory, size_t alignment, size_t bytes) {
  if (!found() || burns()) return ENOMEM;
  const int error = real.posix_memalign(memory, alignment, bytes);
  if (error == 0) counted(*memory);
  return error;
}

EXPORTED void free(void* memory) {
  if (memory == nullptr || is_first(memory) || !found()) return;
  __atomic_fetch_sub(&in_use, 1, __ATOMIC_SEQ_CST);
  real.free(memory);
}

}  // extern "C"

EXPORTED void* operator new(size_t bytes) {
  if (void* const memory = malloc(bytes == 0 ? 1 : bytes)) return memory;
  throw std::bad_alloc();
}
EXPORTED void* operator new[](size_t bytes) { return operator new(bytes); }
EXPORTED void* operator new(size_t bytes, const std::nothrow_t&) noexcept { return malloc(bytes == 0 ? 1 : bytes); }
EXPORTED void* operator new[](size_t bytes, const std::nothrow_t&) noexcept { return malloc(bytes == 0 ? 1 : bytes); }
EXPORTED void operator delete(void* memory) noexcept { free(memory); }
EXPORTED void operator delete[](void* memory) noexcept { free(memory); }
EXPORTED void operator delete(void* memory, size_t) noexcept { free(memory); }
EXPORTED void operator delete[](void* memory, size_t) noexcept { free(memory); }

namespace lowbit::test {

void fail_allocation(int64_t number, bool all_after) {
  __atomic_store_n(&fails_on, all_after, __ATOMIC_SEQ_CST);
  __atomic_store_n(&fuse, number, __ATOMIC_SEQ_CST);
}
void fail_no_allocation() { __atomic_store_n(&fuse, -1, __ATOMIC_SEQ_CST); }
int64_t allocations() { return __atomic_load_n(&asked, __ATOMIC_SEQ_CST); }
int64_t blocks_in_use() { return __atomic_load_n(&in_use, __ATOMIC_SEQ_CST); }

}  // namespace lowbit::test

// Rows of activations in an operator's memory.
#pragma once

#include <cinttypes>
#include <cstdint>
#include <cstring>

#include "../kernels/status.h"
#include "../kernels/ukernel.h"
#include "schedule.h"

namespace lowbit {

// Each piece of an operator's memory starts at a cache line, because some pieces belong to one thread.
constexpr int64_t aligned(int64_t bytes) {
  constexpr int64_t line = kCacheLine;
  return (bytes + line - 1) / line * line;
}

// Copies `count` values of `item` bytes, which are `step` values apart, to contiguous memory.
inline void gather(int64_t item, const void* from, int64_t step, void* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    std::memcpy(static_cast<char*>(to) + i * item, static_cast<const char*>(from) + i * step * item,
                static_cast<size_t>(item));
  }
}

// Checks the memory that a vendor's kernel requests: from `least` to 2^40 bytes.
inline Status check_asked(const LinearKernel& kernel, const char* what, int64_t bytes, int64_t least) {
  if (bytes >= least && bytes <= int64_t{1} << 40) return {};
  return Status::error("kernel '%s' requests %" PRId64 " bytes of %s; expected %" PRId64 " to 2^40", kernel.name, bytes, what,
                       least);
}

// Raises `*bytes` to the scratch memory that the kernel needs per thread.
inline Status add_scratch(const LinearKernel& kernel, const Layout& layout, int64_t m, int threads, int64_t* bytes) {
  if (kernel.scratch_bytes == nullptr) return {};
  const int64_t asked = kernel.scratch_bytes(kernel.context, layout, m, threads);
  if (Status s = check_asked(kernel, "scratch", asked, 0); !s.ok()) return s;
  if (aligned(asked) > *bytes) *bytes = aligned(asked);
  return {};
}

}  // namespace lowbit

// Rows of activations in the memory of an operator.
#pragma once

#include <cinttypes>
#include <cstdint>
#include <cstring>

#include "../kernels/status.h"
#include "../kernels/ukernel.h"
#include "schedule.h"

namespace lowbit {

// Each piece of an operator's memory begins at a cache line: some belong to one thread each.
constexpr int64_t aligned(int64_t bytes) {
  constexpr int64_t line = kCacheLine;
  return (bytes + line - 1) / line * line;
}

// Puts `count` values of `item` bytes, `step` values apart, next to each other.
inline void gather(int64_t item, const void* from, int64_t step, void* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    std::memcpy(static_cast<char*>(to) + i * item, static_cast<const char*>(from) + i * step * item,
                static_cast<size_t>(item));
  }
}

// What a vendor's kernel asks for: `least` to 2^40 bytes.
inline Status check_asked(const LinearKernel& kernel, const char* what, int64_t bytes, int64_t least) {
  if (bytes >= least && bytes <= int64_t{1} << 40) return {};
  return Status::error("kernel '%s' asks for %" PRId64 " bytes of %s; expected %" PRId64 " to 2^40", kernel.name, bytes, what,
                       least);
}

// Makes `*bytes` what each thread's scratch has to have for the kernel, where that is more.
inline Status add_scratch(const LinearKernel& kernel, const Layout& layout, int64_t m, int threads, int64_t* bytes) {
  if (kernel.scratch_bytes == nullptr) return {};
  const int64_t asked = kernel.scratch_bytes(kernel.context, layout, m, threads);
  if (Status s = check_asked(kernel, "scratch", asked, 0); !s.ok()) return s;
  if (aligned(asked) > *bytes) *bytes = aligned(asked);
  return {};
}

}  // namespace lowbit

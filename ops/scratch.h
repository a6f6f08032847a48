// The memory that a call of an operator works in.
#pragma once

#include <cstdint>

#include "../kernels/export.h"
#include "aligned_memory.h"

namespace lowbit {

// The process keeps up to this much between calls, whatever thread they were on: the activations of a call, and what each of
// 300 threads needs. Threads that have no call keep nothing.
inline constexpr int64_t kKeptBytes = 64 << 20;

// A block of memory: its address, with the binary logarithm of its size in the lowest bits; these are 0 for a block that is not
// kept after its call.
using Block = uintptr_t;

// At least `bytes` of memory, of undefined content. 0: there is not so much.
LOWBIT_API Block take_block(int64_t bytes);
LOWBIT_API void give_back(Block block);

// How much is kept now, and the end of that.
LOWBIT_API int64_t kept_bytes();
LOWBIT_API void release_blocks();

// `bytes` of memory, at least one, aligned to kAlignment, of undefined content. The process keeps it for the next call: new
// memory of megabytes costs a page fault for every 4 KiB. More than kKeptBytes is freed after the call.
class Scratch {
 public:
  explicit Scratch(int64_t bytes) : block_(take_block(bytes)) {}
  ~Scratch() { give_back(block_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  // Null: there is not so much memory.
  char* data() const { return reinterpret_cast<char*>(block_ & ~Block{kAlignment - 1}); }

 private:
  const Block block_;
};

}  // namespace lowbit

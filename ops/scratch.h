// The memory that a call of an operator works in.
#pragma once

#include <cstdint>

#include "../kernels/export.h"
#include "../kernels/ukernel.h"
#include "aligned_memory.h"

#if defined(__has_feature)
#if __has_feature(memory_sanitizer)
#include <sanitizer/msan_interface.h>
#define LOWBIT_POISON(memory, bytes) __msan_poison(memory, static_cast<size_t>(bytes))
#endif
#endif

namespace lowbit {

// Up to so much stays with a thread between its calls: activations, and what each of a thousand threads needs.
inline constexpr int64_t kKeptBytes = (32 << 20) + 1024 * kLinearScratchBytes;

// What a thread keeps for its next call.
struct KeptMemory {
  void* memory = nullptr;
  int64_t bytes = 0;
  bool lent = false;  // to a call that is not over: a host may run another one inside of it, on the same thread

  ~KeptMemory() { free_aligned(memory); }
};

// The calling thread's; null: there is no memory for one, or the program is about to end.
LOWBIT_API KeptMemory* kept_memory();

// `bytes` of memory, at least one, 64-byte aligned, of undefined content. The calling thread keeps it for its next
// call: new memory of megabytes costs a page fault for every 4 KiB. More than kKeptBytes is given back after the call,
// the rest when the thread ends.
class Scratch {
 public:
  explicit Scratch(int64_t bytes) {
    KeptMemory* const kept = bytes <= kKeptBytes ? kept_memory() : nullptr;
    if (kept == nullptr || kept->lent) {
      data_ = allocate_aligned(bytes);
      return;
    }
    if (kept->bytes < bytes) {
      free_aligned(kept->memory);
      kept->memory = allocate_aligned(bytes);
      kept->bytes = kept->memory != nullptr ? bytes : 0;
    }
    kept->lent = true;
    borrowed_ = kept;
    data_ = kept->memory;
#ifdef LOWBIT_POISON
    if (data_ != nullptr) LOWBIT_POISON(data_, bytes);  // what an earlier call wrote is not to be read
#endif
  }
  ~Scratch() {
    if (borrowed_ != nullptr) {
      borrowed_->lent = false;
    } else {
      free_aligned(data_);
    }
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  // Null: there is not so much memory.
  char* data() const { return static_cast<char*>(data_); }

 private:
  KeptMemory* borrowed_ = nullptr;
  void* data_;
};

}  // namespace lowbit

// The memory that a call of an operator works in.
#pragma once

#include <cstdint>

#include "aligned_memory.h"

namespace lowbit {

// Up to so much stays with a thread between its calls.
inline constexpr int64_t kKeptBytes = 32 << 20;

// `bytes` of memory, 64-byte aligned, of undefined content. The calling thread keeps it for its next call: new memory
// of megabytes costs a page fault for every 4 KiB. More than kKeptBytes is given back after the call, the rest when the
// thread ends.
class Scratch {
 public:
  explicit Scratch(int64_t bytes) : kept_(kept()) {
    borrowed_ = !kept_.lent && bytes <= kKeptBytes;
    if (!borrowed_) {
      data_ = allocate_aligned(bytes);
      return;
    }
    if (kept_.bytes < bytes) {
      free_aligned(kept_.memory);
      kept_.memory = allocate_aligned(bytes);
      kept_.bytes = kept_.memory != nullptr ? bytes : 0;
    }
    kept_.lent = true;
    data_ = kept_.memory;
  }
  ~Scratch() {
    if (borrowed_) {
      kept_.lent = false;
    } else {
      free_aligned(data_);
    }
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  // Null: there is not so much memory.
  char* data() const { return static_cast<char*>(data_); }

 private:
  struct Kept {
    void* memory = nullptr;
    int64_t bytes = 0;
    // To a call that is not over: a host may run another one inside of it, on the same thread. After the destructor it
    // stays true, for calls that come even later.
    bool lent = false;

    ~Kept() {
      free_aligned(memory);
      lent = true;
    }
  };
  static Kept& kept() {
    static thread_local Kept of_thread;
    return of_thread;
  }

  Kept& kept_;
  bool borrowed_;
  void* data_;
};

}  // namespace lowbit

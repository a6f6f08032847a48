// Buffers that detect out-of-bounds accesses. A buffer touches an inaccessible page, so that even a read beyond it stops the
// test (also under QEMU and Wine). The bytes around it hold a pattern that is checked afterwards.
#pragma once

#include <cstdint>
#include <vector>

#include "written.h"

namespace lowbit::test {

int64_t page_size();  // of the system that the test runs on

// Which side of the buffer touches an inaccessible page.
enum class Wall { after, before };

class Guarded {
 public:
  // `gap`: bytes between the buffer and the inaccessible page, to misalign the buffer.
  explicit Guarded(int64_t bytes, Wall wall = Wall::after, int64_t gap = 0);
  ~Guarded();
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;

  uint8_t* data() { return data_; }
  const uint8_t* data() const { return data_; }
  int64_t size() const { return size_; }
  template <class T>
  T* as() {
    return reinterpret_cast<T*>(data_);
  }
  std::vector<uint8_t> bytes() const { return {data_, data_ + size_}; }

  // Remembers the content, so that intact() also checks that it did not change. For inputs.
  void freeze() {
    accept(data_, size_);  // an output that a refused call must not change
    frozen_ = bytes();
  }

  // Whether the pattern around the buffer, and a frozen content, are unchanged.
  bool intact() const;

 private:
  uint8_t* pages_;  // between the inaccessible pages
  int64_t page_bytes_;
  uint8_t* data_;
  int64_t size_;
  std::vector<uint8_t> frozen_;
};

// Text for the crash handler, because an invalid access ends the process before GoogleTest can name the case.
void set_current_case(const char* text);
void install_crash_handler();

}  // namespace lowbit::test

// A shared library that is opened while the program runs, on any system.
#pragma once

#include "../kernels/status.h"

namespace lowbit {

class SharedLibrary {
 public:
  // `path` as of load_kernels(); the system's own message where it cannot be opened.
  static Status open(const char* path, SharedLibrary* library);

  SharedLibrary() = default;
  ~SharedLibrary();
  SharedLibrary(const SharedLibrary&) = delete;
  SharedLibrary& operator=(const SharedLibrary&) = delete;

  // Null: the library has no such function.
  void* function(const char* name) const;

  // The library stays open when this object ends.
  void keep() { handle_ = nullptr; }

 private:
  void* handle_ = nullptr;
};

}  // namespace lowbit

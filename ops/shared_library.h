// A shared library that is opened at run time, on any system.
#pragma once

#include "../kernels/status.h"

namespace lowbit {

class SharedLibrary {
 public:
  // `path` as in load_kernels(); on failure the error has the system's message.
  static Status open(const char* path, SharedLibrary* library);

  SharedLibrary() = default;
  ~SharedLibrary();
  SharedLibrary(const SharedLibrary&) = delete;
  SharedLibrary& operator=(const SharedLibrary&) = delete;

  // Null if the library has no such function.
  void* function(const char* name) const;

  // The library stays open after this object's lifetime.
  void keep() { handle_ = nullptr; }

 private:
  void* handle_ = nullptr;
};

}  // namespace lowbit

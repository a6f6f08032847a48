#include "shared_library.h"

#include <cstring>

#include "first_glibc.h"

#ifdef _WIN32
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
#else
#include <dlfcn.h>
#endif

LOWBIT_FIRST_GLIBC(dlopen);
LOWBIT_FIRST_GLIBC(dlsym);
LOWBIT_FIRST_GLIBC(dlclose);
LOWBIT_FIRST_GLIBC(dlerror);

namespace lowbit {
namespace {

constexpr size_t kLongest = 250;

// The end of a message: what fits a Status, and names the file.
const char* tail(const char* text) {
  const size_t length = std::strlen(text);
  return length > kLongest ? text + length - kLongest : text;
}

}  // namespace

#ifdef _WIN32

Status SharedLibrary::open(const char* path, SharedLibrary* library) {
  library->handle_ = LoadLibraryA(path);
  if (library->handle_ != nullptr) return {};
  return Status::system("%s: error %lu of LoadLibrary", tail(path), GetLastError());
}

SharedLibrary::~SharedLibrary() {
  if (handle_ != nullptr) FreeLibrary(static_cast<HMODULE>(handle_));
}

void* SharedLibrary::function(const char* name) const {
  return reinterpret_cast<void*>(GetProcAddress(static_cast<HMODULE>(handle_), name));
}

#else

Status SharedLibrary::open(const char* path, SharedLibrary* library) {
  library->handle_ = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library->handle_ != nullptr) return {};
  return Status::system("%s", tail(dlerror()));
}

SharedLibrary::~SharedLibrary() {
  if (handle_ != nullptr) dlclose(handle_);
}

void* SharedLibrary::function(const char* name) const { return dlsym(handle_, name); }

#endif

}  // namespace lowbit

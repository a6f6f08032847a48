#include "shared_library.h"

#include <cstring>

#ifdef _WIN32
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
#else
#include <dlfcn.h>
#endif

// For libraries that must load where glibc is older than the one at hand (cmake/manylinux_2_28.cmake): since 2.34 these
// functions are in libc. Old systems have them in libdl, under their first version, and new ones know that one too.
#ifdef LOWBIT_MANYLINUX_2_28
#ifdef __x86_64__
#define LOWBIT_FIRST_GLIBC "GLIBC_2.2.5"
#else
#define LOWBIT_FIRST_GLIBC "GLIBC_2.17"
#endif
__asm__(".symver dlopen,dlopen@" LOWBIT_FIRST_GLIBC);
__asm__(".symver dlsym,dlsym@" LOWBIT_FIRST_GLIBC);
__asm__(".symver dlclose,dlclose@" LOWBIT_FIRST_GLIBC);
__asm__(".symver dlerror,dlerror@" LOWBIT_FIRST_GLIBC);
#endif

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

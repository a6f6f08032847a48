#include "shared_library.h"

#include <cstdio>
#include <cstring>

#include "first_glibc.h"

#ifdef _WIN32
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
#else
#include <dlfcn.h>
#include <unistd.h>
#endif

LOWBIT_FIRST_GLIBC(dlopen);
LOWBIT_FIRST_GLIBC(dlsym);
LOWBIT_FIRST_GLIBC(dlclose);
LOWBIT_FIRST_GLIBC(dlerror);

namespace lowbit {
namespace {

constexpr size_t kLongest = 250;
#ifdef _WIN32
constexpr DWORD kLongestPath = 4096;
#else
constexpr size_t kLongestName = 255;
#endif

// The end of a message: what fits a Status, and names the file.
const char* tail(const char* text) {
  const size_t length = std::strlen(text);
  return length > kLongest ? text + length - kLongest : text;
}

}  // namespace

#ifdef _WIN32

Status SharedLibrary::open(const char* path, SharedLibrary* library) {
  // A whole path: no directory is searched but the library's own and the system's, for what it needs.
  wchar_t name[kLongestPath], whole[kLongestPath];
  const DWORD flags = LOAD_LIBRARY_SEARCH_DLL_LOAD_DIR | LOAD_LIBRARY_SEARCH_DEFAULT_DIRS;
  if (MultiByteToWideChar(CP_UTF8, MB_ERR_INVALID_CHARS, path, -1, name, kLongestPath) > 0) {
    const DWORD length = GetFullPathNameW(name, kLongestPath, whole, nullptr);
    if (length >= kLongestPath) SetLastError(ERROR_FILENAME_EXCED_RANGE);
    if (length > 0 && length < kLongestPath) library->handle_ = LoadLibraryExW(whole, nullptr, flags);
  }
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
  // dlopen() looks for a name without a slash elsewhere than in the current directory.
  char here[kLongestName + 3];
  const bool is_name = std::strchr(path, '/') == nullptr && std::strlen(path) <= kLongestName;
  if (is_name) std::snprintf(here, sizeof here, "./%s", path);
  library->handle_ = dlopen(is_name && access(here, F_OK) == 0 ? here : path, RTLD_NOW | RTLD_LOCAL);
  if (library->handle_ != nullptr) return {};
  return Status::system("%s", tail(dlerror()));
}

SharedLibrary::~SharedLibrary() {
  if (handle_ != nullptr) dlclose(handle_);
}

void* SharedLibrary::function(const char* name) const { return dlsym(handle_, name); }

#endif

}  // namespace lowbit

#include "shared_library.h"

#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <memory>

#include "first_glibc.h"

#ifdef _WIN32
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
#else
#include <dlfcn.h>
#include <unistd.h>
#ifdef __ELF__
#include <elf.h>
#endif
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

// The end of a message, which fits in a Status and still names the file.
const char* tail(const char* text) {
  const size_t length = std::strlen(text);
  return length > kLongest ? text + length - kLongest : text;
}

}  // namespace

#ifdef _WIN32

Status SharedLibrary::open(const char* path, SharedLibrary* library) {
  // With an absolute path, dependencies are only searched in the library's directory and the system's.
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

// ELF loaders map the segments in a file's table, and end the process by a signal if the file is shorter. They report all other
// errors themselves.
Status check_whole([[maybe_unused]] const char* path) {
#if defined(__ELF__) && defined(__LP64__)
  const std::unique_ptr<FILE, int (*)(FILE*)> file(std::fopen(path, "rb"), std::fclose);
  Elf64_Ehdr header;
  if (file == nullptr || std::fread(&header, sizeof header, 1, file.get()) != 1) return {};
  if (std::memcmp(header.e_ident, ELFMAG, SELFMAG) != 0 || header.e_phentsize != sizeof(Elf64_Phdr)) return {};
  if (std::fseek(file.get(), 0, SEEK_END) != 0) return {};
  const uint64_t bytes = static_cast<uint64_t>(std::ftell(file.get()));
  uint64_t end = header.e_phoff + uint64_t{header.e_phnum} * sizeof(Elf64_Phdr);
  for (unsigned i = 0; i < header.e_phnum && end <= bytes; ++i) {
    Elf64_Phdr segment;
    const uint64_t at = header.e_phoff + i * sizeof segment;
    if (std::fseek(file.get(), static_cast<long>(at), SEEK_SET) != 0) return {};
    if (std::fread(&segment, sizeof segment, 1, file.get()) != 1) return {};
    const uint64_t segment_end = segment.p_offset + segment.p_filesz;
    if (segment.p_type == PT_LOAD && segment_end > end) end = segment_end;
  }
  if (end > bytes) {
    return Status::system("%s is truncated: it has %" PRIu64 " bytes; its header says %" PRIu64 " or more", tail(path), bytes,
                          end);
  }
#endif
  return {};
}

Status SharedLibrary::open(const char* path, SharedLibrary* library) {
  // dlopen() does not look for a name without a slash in the current directory.
  char here[kLongestName + 3];
  const bool is_name = std::strchr(path, '/') == nullptr && std::strlen(path) <= kLongestName;
  if (is_name) std::snprintf(here, sizeof here, "./%s", path);
  if (is_name && access(here, F_OK) == 0) path = here;
  if (Status status = check_whole(path); !status.ok()) return status;
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

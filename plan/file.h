// Opens files by names in UTF-8, on every system.
#pragma once

#include <cerrno>
#include <cstdio>
#include <memory>
#include <string>

#ifdef _WIN32
#define WIN32_LEAN_AND_MEAN
#define NOMINMAX
#include <io.h>
#include <windows.h>
#else
#include <sys/stat.h>
#include <unistd.h>
#endif

namespace lowbit {

struct CloseFile {
  void operator()(std::FILE* file) const { std::fclose(file); }
};
using File = std::unique_ptr<std::FILE, CloseFile>;

#ifdef _WIN32

// An invalid name becomes an empty one, which does not open.
inline std::wstring wide(const std::string& name) {
  const int length = MultiByteToWideChar(CP_UTF8, MB_ERR_INVALID_CHARS, name.c_str(), -1, nullptr, 0);
  std::wstring result(length > 0 ? static_cast<size_t>(length - 1) : 0, L'\0');
  if (!result.empty()) MultiByteToWideChar(CP_UTF8, 0, name.c_str(), -1, result.data(), length);
  return result;
}

inline File open_file(const std::string& name, const char* mode) {
  return File(_wfopen(wide(name).c_str(), wide(mode).c_str()));
}

inline bool is_directory(const std::string& name) {
  const DWORD attributes = GetFileAttributesW(wide(name).c_str());
  return attributes != INVALID_FILE_ATTRIBUTES && (attributes & FILE_ATTRIBUTE_DIRECTORY) != 0;
}

inline bool sync_file(std::FILE* file) { return std::fflush(file) == 0 && _commit(_fileno(file)) == 0; }
inline bool replace_file(const std::string& from, const std::string& to) {
  if (MoveFileExW(wide(from).c_str(), wide(to).c_str(), MOVEFILE_REPLACE_EXISTING) != 0) return true;
  errno = EACCES;
  return false;
}
inline void remove_file(const std::string& name) { _wremove(wide(name).c_str()); }
inline long process_number() { return static_cast<long>(GetCurrentProcessId()); }

#else

inline File open_file(const std::string& name, const char* mode) { return File(std::fopen(name.c_str(), mode)); }

inline bool is_directory(const std::string& name) {
  struct stat about;
  return stat(name.c_str(), &about) == 0 && S_ISDIR(about.st_mode);
}

inline bool sync_file(std::FILE* file) { return std::fflush(file) == 0 && fsync(fileno(file)) == 0; }
inline bool replace_file(const std::string& from, const std::string& to) { return std::rename(from.c_str(), to.c_str()) == 0; }
inline void remove_file(const std::string& name) { std::remove(name.c_str()); }
inline long process_number() { return static_cast<long>(getpid()); }

#endif

}  // namespace lowbit

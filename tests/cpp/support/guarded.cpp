#include "guarded.h"

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>

#ifdef _WIN32
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
#else
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace lowbit::test {

int64_t page_size() {
#ifdef _WIN32
  SYSTEM_INFO info;
  GetSystemInfo(&info);
  return info.dwPageSize;
#else
  static const int64_t size = sysconf(_SC_PAGESIZE);
  return size;
#endif
}

namespace {

#ifdef _WIN32
uint8_t* map_pages(int64_t bytes) {
  const int64_t page = page_size();
  const size_t total = static_cast<size_t>(bytes + 2 * page);
  void* const memory = VirtualAlloc(nullptr, total, MEM_RESERVE, PAGE_NOACCESS);
  if (memory == nullptr) std::abort();
  uint8_t* const pages = static_cast<uint8_t*>(memory) + page;
  if (VirtualAlloc(pages, static_cast<size_t>(bytes), MEM_COMMIT, PAGE_READWRITE) != pages) std::abort();
  return pages;
}
#else
uint8_t* map_pages(int64_t bytes) {
  const int64_t page = page_size();
  const size_t total = static_cast<size_t>(bytes + 2 * page);
  void* memory = mmap(nullptr, total, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) std::abort();
  uint8_t* pages = static_cast<uint8_t*>(memory) + page;
  if (mprotect(pages, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE) != 0) std::abort();
  return pages;
}
#endif

// Mappings are reused, because the tests make tens of thousands of buffers of few sizes, all on one thread.
std::multimap<int64_t, uint8_t*>& pool() {
  static std::multimap<int64_t, uint8_t*> free_pages;
  return free_pages;
}

constexpr int64_t kPattern = 256;  // bytes of pattern that are checked on each side

uint8_t pattern(int64_t index) { return static_cast<uint8_t>(0xa5 ^ (index * 29)); }

char current_case[256] = "";

void say(const char* text) {
#ifdef _WIN32
  DWORD written;
  WriteFile(GetStdHandle(STD_ERROR_HANDLE), text, static_cast<DWORD>(std::strlen(text)), &written, nullptr);
#else
  [[maybe_unused]] const ssize_t written = write(2, text, std::strlen(text));
#endif
}

void say_case() {
  say("\nthe process was stopped (a wild read or write?) in: ");
  say(current_case);
  say("\n");
}

void on_crash(int signal) {
  say_case();
  std::signal(signal, SIG_DFL);
  std::raise(signal);
}

}  // namespace

Guarded::Guarded(int64_t bytes, Wall wall, int64_t gap) : size_(bytes) {
  const int64_t page = page_size();
  page_bytes_ = (bytes + gap + kPattern + page - 1) / page * page;
  if (const auto found = pool().find(page_bytes_); found != pool().end()) {
    pages_ = found->second;
    pool().erase(found);
  } else {
    pages_ = map_pages(page_bytes_);
  }
  data_ = wall == Wall::after ? pages_ + page_bytes_ - gap - bytes : pages_ + gap;
  uint8_t* const first = data_ - pages_ < kPattern ? pages_ : data_ - kPattern;
  uint8_t* const end =
      pages_ + page_bytes_ - (data_ + bytes) < kPattern ? pages_ + page_bytes_ : data_ + bytes + kPattern;
  for (uint8_t* p = first; p < end; ++p) *p = pattern(p - pages_);
  forget(data_, bytes);
}

Guarded::~Guarded() { pool().emplace(page_bytes_, pages_); }

bool Guarded::intact() const {
  for (const uint8_t* p = data_ - pages_ < kPattern ? pages_ : data_ - kPattern; p < data_; ++p) {
    if (*p != pattern(p - pages_)) return false;
  }
  const uint8_t* const limit = pages_ + page_bytes_;
  const uint8_t* const end = limit - (data_ + size_) < kPattern ? limit : data_ + size_ + kPattern;
  for (const uint8_t* p = data_ + size_; p < end; ++p) {
    if (*p != pattern(p - pages_)) return false;
  }
  return frozen_.empty() || std::memcmp(frozen_.data(), data_, frozen_.size()) == 0;
}

void set_current_case(const char* text) { std::snprintf(current_case, sizeof current_case, "%s", text); }

void install_crash_handler() {
#ifdef _WIN32
  SetUnhandledExceptionFilter([](EXCEPTION_POINTERS*) -> LONG {
    say_case();
    return EXCEPTION_CONTINUE_SEARCH;
  });
  std::signal(SIGABRT, on_crash);
#else
  for (const int signal : {SIGSEGV, SIGILL, SIGABRT, SIGBUS}) std::signal(signal, on_crash);
#endif
}

}  // namespace lowbit::test

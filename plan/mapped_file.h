// A file's bytes in memory, mapped where the system can.
#pragma once

#include <cerrno>
#include <cstring>
#include <string>

#include "../kernels/status.h"
#include "file.h"
#include "plan.h"

#ifdef _WIN32
#include "../ops/aligned_memory.h"
#else
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#endif

namespace lowbit {

class MappedFile {
 public:
  MappedFile() = default;
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  MappedFile(MappedFile&& other) noexcept { swap(other); }
  MappedFile& operator=(MappedFile&& other) noexcept {
    swap(other);
    return *this;
  }

  const Memory& memory() const { return memory_; }

#ifdef _WIN32
  ~MappedFile() { free_aligned(memory_.data); }

  Status open(const std::string& path) {
    const File file = open_file(path, "rb");
    if (!file) return Status::system("%s does not open: %s", path.c_str(), std::strerror(errno));
    _fseeki64(file.get(), 0, SEEK_END);
    const int64_t bytes = _ftelli64(file.get());
    _fseeki64(file.get(), 0, SEEK_SET);
    memory_.data = allocate_aligned(bytes + 1);
    if (memory_.data == nullptr) return Status::no_memory("no memory for %s", path.c_str());
    memory_.bytes = bytes;
    if (std::fread(memory_.data, 1, static_cast<size_t>(bytes), file.get()) != static_cast<size_t>(bytes)) {
      return Status::system("%s cannot be read", path.c_str());
    }
    return {};
  }
#else
  ~MappedFile() {
    if (memory_.data != nullptr) munmap(memory_.data, static_cast<size_t>(memory_.bytes));
  }

  Status open(const std::string& path) {
    const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (file < 0) return Status::system("%s does not open: %s", path.c_str(), std::strerror(errno));
    struct stat about;
    const bool known = fstat(file, &about) == 0 && S_ISREG(about.st_mode) && about.st_size > 0;
    void* const data = known ? mmap(nullptr, static_cast<size_t>(about.st_size), PROT_READ, MAP_PRIVATE, file, 0) : MAP_FAILED;
    const int error = errno;
    ::close(file);
    if (!known) return Status::error("%s is empty or not a regular file", path.c_str());
    if (data == MAP_FAILED) return Status::system("%s cannot be mapped: %s", path.c_str(), std::strerror(error));
    memory_ = {data, about.st_size};
#ifdef MADV_HUGEPAGE
    // Linux then reads the file into huge pages, if the file system supports it. Weights are read faster from huge pages.
    madvise(data, static_cast<size_t>(about.st_size), MADV_HUGEPAGE);
#endif
    return {};
  }
#endif

 private:
  void swap(MappedFile& other) {
    const Memory mine = memory_;
    memory_ = other.memory_;
    other.memory_ = mine;
  }

  Memory memory_;
};

}  // namespace lowbit

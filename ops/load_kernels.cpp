#include "load_kernels.h"

#include <cstring>
#include <memory>
#include <mutex>

#include "../kernels/registry.h"
#include "aligned_memory.h"
#include "shared_library.h"
#include "try_kernels.h"

namespace lowbit {
namespace {

constexpr char kFunction[] = "lowbit_kernels";

// The end of a path, which fits in a message and still identifies the file.
const char* tail(const char* path) {
  constexpr size_t longest = 100;
  const size_t length = std::strlen(path);
  return length > longest ? path + length - longest : path;
}

}  // namespace

Status add_kernels(const lowbit_library& library, const char* name) {
  if (name == nullptr) return Status::error("the kernel library has no name; expected one, as its origin");
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  if (is_loaded(library)) return {};
  const auto refusal = [&](const Status& status) {
    if (status.kind() == Status::Kind::no_memory) return status;
    return Status::error("'%s' cannot be used: %s", tail(name), status.message());
  };
  if (const Status status = check_tables(library); !status.ok()) return refusal(status);
  // Memory for copies of the tables and of the path. The registry keeps it if the library is accepted.
  const size_t bytes = copy_bytes(library), name_bytes = std::strlen(name) + 1;
  std::unique_ptr<void, FreeAligned> memory(allocate_aligned(static_cast<int64_t>(bytes + name_bytes)));
  if (memory == nullptr) return Status::no_memory("no memory for the kernels of '%s'", tail(name));
  LoadedLibrary copy = copy_tables(library, memory.get());
  copy.path = static_cast<char*>(memory.get()) + bytes;
  std::memcpy(static_cast<char*>(memory.get()) + bytes, name, name_bytes);
  if (const Status status = check_kernels(copy); !status.ok()) return refusal(status);
  if (const Status status = try_kernels(copy); !status.ok()) return refusal(status);
  if (Status status = add_library(copy); !status.ok()) return status;
  memory.release();
  return {};
}

Status load_kernels(const char* path) {
  if (const Status& status = isa_cap_status(); !status.ok()) return status;
  // dlopen would open the program itself.
  if (path == nullptr || path[0] == '\0') return Status::error("the path of the kernel library is empty");
  SharedLibrary opened;
  if (const Status status = SharedLibrary::open(path, &opened); !status.ok()) {
    return Status::system("kernel library does not load: %s", status.message());
  }
  const auto kernels = reinterpret_cast<lowbit_kernels_function*>(opened.function(kFunction));
  if (kernels == nullptr) {
    return Status::error("'%s' is not a kernel library: it has no function '%s'", tail(path), kFunction);
  }
  const lowbit_library* const library = kernels(kKernelAbi);
  if (library == nullptr) {
    return Status::error("'%s' has no kernels for version %d of lowbit's kernel interface on this CPU", tail(path),
                         static_cast<int>(kKernelAbi));
  }
  if (Status status = add_kernels(*library, path); !status.ok()) return status;
  opened.keep();
  return {};
}

}  // namespace lowbit

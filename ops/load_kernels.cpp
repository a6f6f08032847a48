#include "load_kernels.h"

#include <cstring>
#include <memory>
#include <mutex>
#include <new>

#include "../kernels/registry.h"
#include "shared_library.h"
#include "try_kernels.h"

namespace lowbit {
namespace {

constexpr char kFunction[] = "lowbit_kernels";

// The end of a path: what fits a message and tells files apart.
const char* tail(const char* path) {
  constexpr size_t longest = 100;
  const size_t length = std::strlen(path);
  return length > longest ? path + length - longest : path;
}

}  // namespace

Status add_kernels(const KernelLibrary& library, const char* name) {
  if (name == nullptr) return Status::error("the kernel library has no name; expected one, as its origin");
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  if (is_loaded(library)) return {};
  Status status = check_library(library);
  if (status.ok()) status = try_kernels(library);
  if (status.kind() == Status::Kind::no_memory) return status;
  if (!status.ok()) return Status::error("'%s' cannot be used: %s", tail(name), status.message());
  const size_t bytes = std::strlen(name) + 1;
  std::unique_ptr<char[]> copy(new (std::nothrow) char[bytes]);
  if (copy == nullptr) return Status::no_memory("no memory for a path of %zu bytes", bytes);
  std::memcpy(copy.get(), name, bytes);
  if (status = add_library(library, copy.get()); !status.ok()) return status;
  copy.release();  // the registry's from now on
  return {};
}

Status load_kernels(const char* path) {
  if (const Status& status = isa_cap_status(); !status.ok()) return status;
  // dlopen would take it for the program itself.
  if (path == nullptr || path[0] == '\0') return Status::error("the path of the kernel library is empty");
  SharedLibrary opened;
  if (const Status status = SharedLibrary::open(path, &opened); !status.ok()) {
    return Status::system("kernel library does not load: %s", status.message());
  }
  const auto kernels = reinterpret_cast<KernelLibraryFunction*>(opened.function(kFunction));
  if (kernels == nullptr) {
    return Status::error("'%s' is no kernel library: it has no function '%s'", tail(path), kFunction);
  }
  const KernelLibrary* const library = kernels(kKernelAbi);
  if (library == nullptr) {
    return Status::error("'%s' has no kernels for version %d of lowbit's kernel interface on this CPU", tail(path),
                         static_cast<int>(kKernelAbi));
  }
  if (Status status = add_kernels(*library, path); !status.ok()) return status;
  opened.keep();
  return {};
}

}  // namespace lowbit

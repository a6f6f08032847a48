// A user's program: loads the given kernel libraries and prints their kernels.

#include <lowbit/kernels/registry.h>
#include <lowbit/ops/load_kernels.h>

#include <cstdio>

int main(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    const lowbit::Status status = lowbit::load_kernels(argv[i]);
    if (!status.ok()) std::printf("refused: %s\n", status.message());
  }
  for (size_t i = 0; i < lowbit::linear_kernel_count(); ++i) {
    const lowbit::LinearKernel& row = lowbit::linear_kernel(i);
    const lowbit::LoadedLibrary* const loaded = lowbit::library_of(&row);
    if (loaded != nullptr) std::printf("%s of %s\n", row.name, loaded->library->vendor);
  }
}

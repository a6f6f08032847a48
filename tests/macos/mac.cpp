// Prints what the loaded liblowbit detected and contains, for `make test-macos-run`.
//   mac cpu    the instruction sets of this CPU and the number of threads that use the SME2 unit
//   mac rows   every kernel of the tables, with the instruction sets that it needs
#include <cstdio>
#include <cstring>

#include "../../kernels/registry.h"
#include "../../ops/sme_threads.h"

using namespace lowbit;

template <class Row>
static void print_rows(size_t count, const Row& row) {
  for (size_t i = 0; i < count; ++i) std::printf("%s %u\n", row(i).name, static_cast<unsigned>(row(i).isa));
}

int main(int argc, char** argv) {
  if (argc == 2 && std::strcmp(argv[1], "rows") == 0) {
    print_rows(quantize_kernel_count(), quantize_kernel);
    print_rows(linear_kernel_count(), linear_kernel);
    print_rows(embedding_kernel_count(), embedding_kernel);
    print_rows(attention_kernel_count(), attention_kernel);
    return 0;
  }
  if (argc != 2 || std::strcmp(argv[1], "cpu") != 0) {
    std::fprintf(stderr, "mac has no argument, or another than cpu and rows\n");
    return 2;
  }
  size_t count;
  const IsaName* const names = isa_names(&count);
  for (size_t i = 0; i < count; ++i) {
    if ((names[i].bit & cpu_isa()) != 0) std::printf("%s ", names[i].name);
  }
  std::printf("%d\n", sme_threads());
}

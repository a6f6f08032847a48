#include "registry.h"

#include <cassert>

namespace lowbit {

// The tables, one per ISA file.
extern const Table<QuantizeKernel> kQuantizePortable, kQuantizeNeon, kQuantizeAvx2, kQuantizeAvx512Vnni;
extern const Table<LinearKernel> kLinearPortable, kLinearNeon, kLinearNeonDot, kLinearI8mm;
extern const Table<LinearKernel> kLinearAvx2, kLinearAvxVnni, kLinearAvx512Vnni;
extern const Table<EmbeddingKernel> kEmbeddingPortable, kEmbeddingNeon, kEmbeddingAvx2, kEmbeddingAvx512Vnni;

namespace {

// Best first: the first row that fits the task and the ISA is chosen.
#if defined(__aarch64__)
constexpr const Table<QuantizeKernel>* kQuantize[] = {&kQuantizeNeon, &kQuantizePortable};
constexpr const Table<LinearKernel>* kLinear[] = {&kLinearI8mm, &kLinearNeonDot, &kLinearNeon, &kLinearPortable};
constexpr const Table<EmbeddingKernel>* kEmbedding[] = {&kEmbeddingNeon, &kEmbeddingPortable};
#elif defined(__x86_64__)
constexpr const Table<QuantizeKernel>* kQuantize[] = {&kQuantizeAvx512Vnni, &kQuantizeAvx2, &kQuantizePortable};
constexpr const Table<LinearKernel>* kLinear[] = {&kLinearAvx512Vnni, &kLinearAvxVnni, &kLinearAvx2,
                                                  &kLinearPortable};
constexpr const Table<EmbeddingKernel>* kEmbedding[] = {&kEmbeddingAvx512Vnni, &kEmbeddingAvx2,
                                                        &kEmbeddingPortable};
#else
constexpr const Table<QuantizeKernel>* kQuantize[] = {&kQuantizePortable};
constexpr const Table<LinearKernel>* kLinear[] = {&kLinearPortable};
constexpr const Table<EmbeddingKernel>* kEmbedding[] = {&kEmbeddingPortable};
#endif

template <class Tables>
size_t count_rows(const Tables& tables) {
  size_t count = 0;
  for (const auto* table : tables) count += table->count;
  return count;
}

template <class Tables>
const auto& row(const Tables& tables, size_t index) {
  for (const auto* table : tables) {
    if (index < table->count) return table->rows[index];
    index -= table->count;
  }
  assert(!"kernel index out of range");
  __builtin_unreachable();
}

template <class Tables, class Fits>
const auto& first(const Tables& tables, IsaBits isa, Fits fits) {
  for (const auto* table : tables) {
    for (const auto& kernel : *table) {
      if ((kernel.isa & ~isa) == 0 && fits(kernel)) return kernel;
    }
  }
  assert(!"no kernel fits: the portable rows must cover every task");
  __builtin_unreachable();
}

}  // namespace

size_t quantize_kernel_count() { return count_rows(kQuantize); }
const QuantizeKernel& quantize_kernel(size_t index) { return row(kQuantize, index); }
size_t linear_kernel_count() { return count_rows(kLinear); }
const LinearKernel& linear_kernel(size_t index) { return row(kLinear, index); }
size_t embedding_kernel_count() { return count_rows(kEmbedding); }
const EmbeddingKernel& embedding_kernel(size_t index) { return row(kEmbedding, index); }

const QuantizeKernel& choose_quantize(IsaBits isa) {
  return first(kQuantize, isa, [](const QuantizeKernel&) { return true; });
}

const LinearKernel& choose_linear(Format format, int bits, int64_t m, IsaBits isa) {
  return first(kLinear, isa, [=](const LinearKernel& kernel) {
    return kernel.format == format && kernel.bits == bits && kernel.m_step <= m;
  });
}

const EmbeddingKernel& choose_embedding(Format format, int bits, IsaBits isa) {
  return first(kEmbedding, isa, [=](const EmbeddingKernel& kernel) {
    return kernel.format == format && kernel.bits == bits;
  });
}

}  // namespace lowbit

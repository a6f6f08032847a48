#include "registry.h"

#include <atomic>
#include <cassert>

namespace lowbit {

// The tables of isas.h.
#define LOWBIT_DECLARE(Family, Name) extern const Table<Family##Kernel> k##Family##Name;
#define LOWBIT_ADDRESS(Family, Name) &k##Family##Name,
#define LOWBIT_FAMILY(Family, TABLES)                             \
  TABLES(LOWBIT_DECLARE, Family) LOWBIT_DECLARE(Family, Portable) \
  constexpr const Table<Family##Kernel>* k##Family##Tables[] = {  \
      TABLES(LOWBIT_ADDRESS, Family) LOWBIT_ADDRESS(Family, Portable)};
LOWBIT_FAMILY(Quantize, LOWBIT_VECTOR_TABLES)
LOWBIT_FAMILY(Linear, LOWBIT_LINEAR_TABLES)
LOWBIT_FAMILY(Embedding, LOWBIT_VECTOR_TABLES)
LOWBIT_FAMILY(Attention, LOWBIT_ATTENTION_TABLES)
LOWBIT_FAMILY(Recurrence, LOWBIT_VECTOR_TABLES)
LOWBIT_FAMILY(Elementwise, LOWBIT_VECTOR_TABLES)
#undef LOWBIT_FAMILY
#undef LOWBIT_ADDRESS
#undef LOWBIT_DECLARE

namespace {

// Libraries are only appended: an entry is written before the count that publishes it, and then never changes.
constexpr size_t kMostLibraries = 64;
LoadedLibrary loaded[kMostLibraries];
std::atomic<size_t> loaded_count{0};

template <class Kernel>
using Loaded = Table<Kernel> LoadedLibrary::*;

template <class Tables, class Kernel>
size_t count_kernels(const Tables& tables, Loaded<Kernel> library_table) {
  size_t count = 0;
  for (const auto* table : tables) count += table->count;
  const size_t libraries = loaded_count.load(std::memory_order_acquire);
  for (size_t i = 0; i < libraries; ++i) count += (loaded[i].*library_table).count;
  return count;
}

template <class Tables, class Kernel>
const Kernel& kernel_at(const Tables& tables, Loaded<Kernel> library_table, size_t index) {
  for (const auto* table : tables) {
    if (index < table->count) return table->entries[index];
    index -= table->count;
  }
  const size_t libraries = loaded_count.load(std::memory_order_acquire);
  for (size_t i = 0; i < libraries; ++i) {
    const Table<Kernel>& table = loaded[i].*library_table;
    if (index < table.count) return table.entries[index];
    index -= table.count;
  }
  assert(!"kernel index out of range");
  __builtin_unreachable();
}

template <class Kernel, class Fits>
const Kernel* first_of(const Table<Kernel>& table, IsaBits isa, const Fits& fits) {
  for (const Kernel& kernel : table) {
    if ((kernel.isa & ~isa) == 0 && fits(kernel)) return &kernel;
  }
  return nullptr;
}

// The first kernel that fits: of libraries before the built-in kernels, built-in, of libraries after them. Null if none fits.
template <class Kernel, class Fits, class BuiltIn>
const Kernel* first_with(const BuiltIn& first_built_in, Loaded<Kernel> library_table, IsaBits isa, const Fits& fits) {
  const size_t libraries = loaded_count.load(std::memory_order_acquire);
  const auto first_loaded = [&](Preference preference) {
    const Kernel* fitting = nullptr;
    for (size_t i = 0; fitting == nullptr && i < libraries; ++i) {
      if (loaded[i].library->preference == preference) fitting = first_of(loaded[i].*library_table, isa, fits);
    }
    return fitting;
  };
  if (const Kernel* fitting = first_loaded(Preference::before_built_in)) return fitting;
  if (const Kernel* fitting = first_built_in()) return fitting;
  return first_loaded(Preference::after_built_in);
}

template <class Tables, class Kernel, class Fits>
const Kernel* first(const Tables& tables, Loaded<Kernel> library_table, IsaBits isa, const Fits& fits) {
  const auto built_in = [&]() -> const Kernel* {
    for (const auto* table : tables) {
      if (const Kernel* fitting = first_of(*table, isa, fits)) return fitting;
    }
    return nullptr;
  };
  return first_with(built_in, library_table, isa, fits);
}

// The built-in linear kernels of each width, in the order of the tables. The tables contain all widths, and a search through
// dozens of kernels takes time in calls of small layers.
struct LinearIndex {
  static constexpr int kMostKernels = 16;
  const LinearKernel* kernels[9][kMostKernels] = {};  // null after the last

  LinearIndex() {
    for (const auto* table : kLinearTables) {
      for (const LinearKernel& kernel : *table) {
        int at = 0;
        while (kernels[kernel.bits][at] != nullptr) ++at;
        if (at + 1 == kMostKernels) __builtin_trap();  // increase kMostKernels; the first call of any test finds this
        kernels[kernel.bits][at] = &kernel;
      }
    }
  }
};

template <class Fits>
const LinearKernel* first_built_in_linear(int bits, IsaBits isa, const Fits& fits) {
  static const LinearIndex index;
  if (bits < 1 || bits > 8) return nullptr;
  for (const LinearKernel* const* kernel = index.kernels[bits]; *kernel != nullptr; ++kernel) {
    if (((*kernel)->isa & ~isa) == 0 && fits(**kernel)) return *kernel;
  }
  return nullptr;
}

template <class Fits>
const LinearKernel* first_linear(int bits, IsaBits isa, const Fits& fits) {
  return first_with([&] { return first_built_in_linear(bits, isa, fits); }, &LoadedLibrary::linear, isa, fits);
}

template <class Kernel>
bool can_read(const Kernel& kernel, const Layout& layout) {
  return kernel.format == layout.format && kernel.bits == layout.bits &&
         (kernel.mappings & bit_of(layout.mapping)) != 0;
}

}  // namespace

size_t quantize_kernel_count() { return count_kernels(kQuantizeTables, &LoadedLibrary::quantize); }
const QuantizeKernel& quantize_kernel(size_t index) { return kernel_at(kQuantizeTables, &LoadedLibrary::quantize, index); }
size_t linear_kernel_count() { return count_kernels(kLinearTables, &LoadedLibrary::linear); }
const LinearKernel& linear_kernel(size_t index) { return kernel_at(kLinearTables, &LoadedLibrary::linear, index); }
size_t embedding_kernel_count() { return count_kernels(kEmbeddingTables, &LoadedLibrary::embedding); }
const EmbeddingKernel& embedding_kernel(size_t index) { return kernel_at(kEmbeddingTables, &LoadedLibrary::embedding, index); }

size_t attention_kernel_count() { return count_kernels(kAttentionTables, &LoadedLibrary::attention); }
const AttentionKernel& attention_kernel(size_t index) { return kernel_at(kAttentionTables, &LoadedLibrary::attention, index); }

const QuantizeKernel& choose_quantize(IsaBits isa) {
  return *first(kQuantizeTables, &LoadedLibrary::quantize, isa, [](const QuantizeKernel&) { return true; });
}

const LinearKernel& choose_linear_built_in(const Layout& layout, int64_t m, IsaBits isa) {
  return *first_built_in_linear(layout.bits, isa, [&](const LinearKernel& kernel) {
    return can_read(kernel, layout) && !kernel.several_streams && kernel.m_least <= m &&
           (kernel.supports == nullptr || kernel.supports(kernel.context, layout, m, isa));
  });
}

const LinearKernel& choose_linear(const Layout& layout, int64_t m, IsaBits isa, Streams streams) {
  const auto reads = [&](const LinearKernel& kernel) {
    return can_read(kernel, layout) && (!kernel.several_streams || streams == Streams::several);
  };
  const auto takes = [&](const LinearKernel& kernel) {
    return reads(kernel) && (kernel.supports == nullptr || kernel.supports(kernel.context, layout, m, isa));
  };
  const auto suits = [&](const LinearKernel& kernel) { return kernel.m_least <= m && takes(kernel); };
  if (const LinearKernel* fitting = first_linear(layout.bits, isa, suits)) return *fitting;
  // A kernel whose tile is for more rows of m is better than none.
  if (const LinearKernel* fitting = first_linear(layout.bits, isa, takes)) return *fitting;
  static constexpr LinearKernel kNone{"none", kPortable, Format::panel16, 0, 0, 0, nullptr};
  return kNone;
}

const EmbeddingKernel& choose_embedding(const Layout& layout, IsaBits isa) {
  const auto reads = [&](const EmbeddingKernel& kernel) { return can_read(kernel, layout); };
  if (const EmbeddingKernel* fitting = first(kEmbeddingTables, &LoadedLibrary::embedding, isa, reads)) return *fitting;
  static constexpr EmbeddingKernel kNone{"none", kPortable, Format::panel16, 0, nullptr};
  return kNone;
}

const AttentionKernel& choose_attention(IsaBits isa) {
  return *first(kAttentionTables, &LoadedLibrary::attention, isa, [](const AttentionKernel&) { return true; });
}

// Tables with one kernel each. Libraries have no such kernels.
template <class Tables>
static const auto& only_kernel(const Tables& tables, IsaBits isa) {
  const auto* const* table = tables;
  while (((*table)->entries[0].isa & ~isa) != 0) ++table;  // the last one is portable
  return (*table)->entries[0];
}

size_t recurrence_kernel_count() { return sizeof kRecurrenceTables / sizeof *kRecurrenceTables; }
const RecurrenceKernel& recurrence_kernel(size_t index) { return kRecurrenceTables[index]->entries[0]; }
const RecurrenceKernel& choose_recurrence(IsaBits isa) { return only_kernel(kRecurrenceTables, isa); }

size_t elementwise_kernel_count() { return sizeof kElementwiseTables / sizeof *kElementwiseTables; }
const ElementwiseKernel& elementwise_kernel(size_t index) { return kElementwiseTables[index]->entries[0]; }
const ElementwiseKernel& choose_elementwise(IsaBits isa) { return only_kernel(kElementwiseTables, isa); }

const QuantizeKernel& portable_quantize() { return kQuantizePortable.entries[0]; }

const LinearKernel& portable_linear(int bits) {
  assert(kLinearPortable.entries[bits - 1].bits == bits);
  return kLinearPortable.entries[bits - 1];
}

const EmbeddingKernel& portable_embedding(int bits) {
  assert(kEmbeddingPortable.entries[bits - 1].bits == bits);
  return kEmbeddingPortable.entries[bits - 1];
}

const AttentionKernel& portable_attention() { return kAttentionPortable.entries[0]; }

const LoadedLibrary* library_of(const void* kernel) {
  const size_t libraries = loaded_count.load(std::memory_order_acquire);
  for (size_t i = 0; i < libraries; ++i) {
    const LoadedLibrary& library = loaded[i];
    const auto holds = [kernel](const auto& table) {
      bool is_in = false;
      for (const auto& entry : table) is_in = is_in || &entry == kernel;
      return is_in;
    };
    if (holds(library.linear) || holds(library.embedding) || holds(library.quantize) || holds(library.attention)) {
      return &library;
    }
  }
  return nullptr;
}

const PackedFormat* find_format(Format format) {
  const size_t libraries = loaded_count.load(std::memory_order_acquire);
  for (size_t i = 0; i < libraries; ++i) {
    for (const PackedFormat& known : loaded[i].formats) {
      if (known.format == format) return &known;
    }
  }
  return nullptr;
}

bool is_loaded(const lowbit_library& library) {
  const size_t libraries = loaded_count.load(std::memory_order_acquire);
  for (size_t i = 0; i < libraries; ++i) {
    if (loaded[i].library == &library) return true;
  }
  return false;
}

Status add_library(const LoadedLibrary& library) {
  const size_t libraries = loaded_count.load(std::memory_order_acquire);
  if (libraries == kMostLibraries) {
    return Status::error("%zu kernel libraries are loaded; no more can be loaded", libraries);
  }
  loaded[libraries] = library;
  loaded_count.store(libraries + 1, std::memory_order_release);
  return {};
}

}  // namespace lowbit

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

// Libraries are only ever appended: an entry is written before the count that publishes it, and then stays.
constexpr size_t kMostLibraries = 64;
LoadedLibrary loaded[kMostLibraries];
std::atomic<size_t> loaded_count{0};

template <class Kernel>
using Rows = Table<Kernel> LoadedLibrary::*;

template <class Tables, class Kernel>
size_t count_rows(const Tables& tables, Rows<Kernel> rows) {
  size_t count = 0;
  for (const auto* table : tables) count += table->count;
  const size_t libraries = loaded_count.load(std::memory_order_acquire);
  for (size_t i = 0; i < libraries; ++i) count += (loaded[i].*rows).count;
  return count;
}

template <class Tables, class Kernel>
const Kernel& row(const Tables& tables, Rows<Kernel> rows, size_t index) {
  for (const auto* table : tables) {
    if (index < table->count) return table->rows[index];
    index -= table->count;
  }
  const size_t libraries = loaded_count.load(std::memory_order_acquire);
  for (size_t i = 0; i < libraries; ++i) {
    const Table<Kernel>& table = loaded[i].*rows;
    if (index < table.count) return table.rows[index];
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

// The first row that fits: of the libraries that go before the built-in rows, of these, of the others. Null: none does.
template <class Kernel, class Fits, class BuiltIn>
const Kernel* first_with(const BuiltIn& first_built_in, Rows<Kernel> rows, IsaBits isa, const Fits& fits) {
  const size_t libraries = loaded_count.load(std::memory_order_acquire);
  const auto first_loaded = [&](Preference preference) {
    const Kernel* fitting = nullptr;
    for (size_t i = 0; fitting == nullptr && i < libraries; ++i) {
      if (loaded[i].library->preference == preference) fitting = first_of(loaded[i].*rows, isa, fits);
    }
    return fitting;
  };
  if (const Kernel* fitting = first_loaded(Preference::before_built_in)) return fitting;
  if (const Kernel* fitting = first_built_in()) return fitting;
  return first_loaded(Preference::after_built_in);
}

template <class Tables, class Kernel, class Fits>
const Kernel* first(const Tables& tables, Rows<Kernel> rows, IsaBits isa, const Fits& fits) {
  const auto built_in = [&]() -> const Kernel* {
    for (const auto* table : tables) {
      if (const Kernel* fitting = first_of(*table, isa, fits)) return fitting;
    }
    return nullptr;
  };
  return first_with(built_in, rows, isa, fits);
}

// The built-in linear rows of each width, in the order of the tables: these hold all widths, and a small layer's call
// would look at dozens of rows.
struct LinearIndex {
  static constexpr int kMostRows = 16;
  const LinearKernel* rows[9][kMostRows] = {};  // null behind the last

  LinearIndex() {
    for (const auto* table : kLinearTables) {
      for (const LinearKernel& row : *table) {
        int at = 0;
        while (rows[row.bits][at] != nullptr) ++at;
        if (at + 1 == kMostRows) __builtin_trap();  // a new table needs a larger kMostRows; the first call of any test says so
        rows[row.bits][at] = &row;
      }
    }
  }
};

template <class Fits>
const LinearKernel* first_built_in_linear(int bits, IsaBits isa, const Fits& fits) {
  static const LinearIndex index;
  if (bits < 1 || bits > 8) return nullptr;
  for (const LinearKernel* const* row = index.rows[bits]; *row != nullptr; ++row) {
    if (((*row)->isa & ~isa) == 0 && fits(**row)) return *row;
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

size_t quantize_kernel_count() { return count_rows(kQuantizeTables, &LoadedLibrary::quantize); }
const QuantizeKernel& quantize_kernel(size_t index) { return row(kQuantizeTables, &LoadedLibrary::quantize, index); }
size_t linear_kernel_count() { return count_rows(kLinearTables, &LoadedLibrary::linear); }
const LinearKernel& linear_kernel(size_t index) { return row(kLinearTables, &LoadedLibrary::linear, index); }
size_t embedding_kernel_count() { return count_rows(kEmbeddingTables, &LoadedLibrary::embedding); }
const EmbeddingKernel& embedding_kernel(size_t index) { return row(kEmbeddingTables, &LoadedLibrary::embedding, index); }

size_t attention_kernel_count() { return count_rows(kAttentionTables, &LoadedLibrary::attention); }
const AttentionKernel& attention_kernel(size_t index) { return row(kAttentionTables, &LoadedLibrary::attention, index); }

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
  // A row whose tile is for more rows of m is better than none.
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

// Tables of one row, of which libraries have none.
template <class Tables>
static const auto& only_row(const Tables& tables, IsaBits isa) {
  const auto* const* table = tables;
  while (((*table)->rows[0].isa & ~isa) != 0) ++table;  // the last one is portable
  return (*table)->rows[0];
}

size_t recurrence_kernel_count() { return sizeof kRecurrenceTables / sizeof *kRecurrenceTables; }
const RecurrenceKernel& recurrence_kernel(size_t index) { return kRecurrenceTables[index]->rows[0]; }
const RecurrenceKernel& choose_recurrence(IsaBits isa) { return only_row(kRecurrenceTables, isa); }

size_t elementwise_kernel_count() { return sizeof kElementwiseTables / sizeof *kElementwiseTables; }
const ElementwiseKernel& elementwise_kernel(size_t index) { return kElementwiseTables[index]->rows[0]; }
const ElementwiseKernel& choose_elementwise(IsaBits isa) { return only_row(kElementwiseTables, isa); }

const QuantizeKernel& portable_quantize() { return kQuantizePortable.rows[0]; }

const LinearKernel& portable_linear(int bits) {
  assert(kLinearPortable.rows[bits - 1].bits == bits);
  return kLinearPortable.rows[bits - 1];
}

const EmbeddingKernel& portable_embedding(int bits) {
  assert(kEmbeddingPortable.rows[bits - 1].bits == bits);
  return kEmbeddingPortable.rows[bits - 1];
}

const AttentionKernel& portable_attention() { return kAttentionPortable.rows[0]; }

const LoadedLibrary* library_of(const void* row) {
  const size_t libraries = loaded_count.load(std::memory_order_acquire);
  for (size_t i = 0; i < libraries; ++i) {
    const LoadedLibrary& library = loaded[i];
    const auto holds = [row](const auto& table) {
      bool is_in = false;
      for (const auto& kernel : table) is_in = is_in || &kernel == row;
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

// Decides whether a library's table can be trusted, by everything that can be checked without calling its kernels.

#include "library.h"

#include <cinttypes>
#include <cstddef>
#include <cstring>

#include "registry.h"

namespace lowbit {
namespace {

constexpr size_t kMostEntries = 1024;
constexpr size_t kLongestName = 63;

bool is_name_char(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '-';
}

// `what` is the owner of the name in messages.
Status check_name(const char* what, const char* name) {
  if (name == nullptr) return Status::error("%s has no name", what);
  const size_t length = strnlen(name, kLongestName + 1);
  if (length == 0) return Status::error("%s has an empty name", what);
  if (length > kLongestName) {
    return Status::error("%s has the name '%.32s...'; expected at most %zu characters", what, name, kLongestName);
  }
  for (size_t i = 0; i < length; ++i) {
    if (!is_name_char(name[i]) && !(name[i] == '.' && i > 0)) {
      return Status::error("%s has the byte 0x%02x in its name; expected letters, digits, '-', '_' and '.'", what,
                           static_cast<unsigned char>(name[i]));
    }
  }
  return {};
}

template <class Table>
Status check_table(const char* what, const Table& table) {
  if (table.count > kMostEntries) {
    return Status::error("it has %zu %s; expected at most %zu", table.count, what, kMostEntries);
  }
  if (table.count > 0 && table.entries == nullptr) {
    return Status::error("it has %zu %s at a null address", table.count, what);
  }
  return {};
}

bool is_built_in_or_loaded(const char* name) {
  for (size_t i = 0; i < linear_kernel_count(); ++i) {
    if (std::strcmp(linear_kernel(i).name, name) == 0) return true;
  }
  for (size_t i = 0; i < embedding_kernel_count(); ++i) {
    if (std::strcmp(embedding_kernel(i).name, name) == 0) return true;
  }
  for (size_t i = 0; i < quantize_kernel_count(); ++i) {
    if (std::strcmp(quantize_kernel(i).name, name) == 0) return true;
  }
  for (size_t i = 0; i < attention_kernel_count(); ++i) {
    if (std::strcmp(attention_kernel(i).name, name) == 0) return true;
  }
  return false;
}

template <class Kernel>
size_t count_of(const Table<Kernel>& table, const char* name) {
  size_t count = 0;
  for (const Kernel& kernel : table) count += kernel.name != nullptr && std::strcmp(kernel.name, name) == 0;
  return count;
}

// Checks the fields that kernels of every family have. Names are compared only after all of them were checked.
template <class Kernel>
Status check_kernel(const char* family, size_t index, const Kernel& kernel) {
  char what[48];
  std::snprintf(what, sizeof what, "%s kernel %zu", family, index);
  if (Status status = check_name(what, kernel.name); !status.ok()) return status;
  if (kernel.run == nullptr) return Status::error("kernel '%s' has no function", kernel.name);
  size_t count;
  const IsaName* const names = isa_names(&count);
  const IsaBits known = names[count - 1].allows;
  if ((kernel.isa & ~known) != 0) {
    return Status::error("kernel '%s' requires the ISA bits 0x%" PRIx32 "; this build knows 0x%" PRIx32, kernel.name,
                         kernel.isa, known);
  }
  return {};
}

template <class Kernel>
Status check_format_and_bits(const LoadedLibrary& library, const Kernel& kernel) {
  if (kernel.format != Format::panel16 && find_format(kernel.format) == nullptr) {
    bool is_known = false;
    for (const PackedFormat& format : library.formats) is_known = is_known || format.format == kernel.format;
    if (!is_known) {
      return Status::error("kernel '%s' is of the format '%s' (0x%" PRIx32 "); expected panel16, or a format of this or a "
                           "loaded library",
                           kernel.name, name_of(kernel.format).text, static_cast<uint32_t>(kernel.format));
    }
  }
  if (kernel.bits < 1 || kernel.bits > 8) {
    return Status::error("kernel '%s' has %d bits; expected 1 to 8", kernel.name, kernel.bits);
  }
  if ((kernel.mappings & ~kAllMappings) != 0) {
    return Status::error("kernel '%s' reads the mappings 0x%02x; expected some of 0x%02x", kernel.name, kernel.mappings,
                         kAllMappings);
  }
  return {};
}

Status check_attention(const AttentionKernel& kernel) {
  if (kernel.write != nullptr && kernel.join != nullptr) return {};
  return Status::error("kernel '%s' has no function %s", kernel.name, kernel.write == nullptr ? "write" : "join");
}

Status check_linear(const LoadedLibrary& library, const LinearKernel& kernel) {
  if (Status status = check_format_and_bits(library, kernel); !status.ok()) return status;
  const bool n_fits = kernel.n_step > 0 && (kPanelRows % kernel.n_step == 0 || kernel.n_step % kPanelRows == 0);
  if (kernel.m_least < 1 || !n_fits) {
    return Status::error("kernel '%s' has the tile %d x %d; expected 1 row or more, and a divisor or multiple of %d "
                         "columns",
                         kernel.name, kernel.m_least, kernel.n_step, kPanelRows);
  }
  if ((kernel.x_types & ~(bit_of(DType::f32) | bit_of(DType::bf16) | bit_of(DType::f16))) != 0) {
    return Status::error("kernel '%s' prepares the types 0x%02x; expected some of 0x07", kernel.name, kernel.x_types);
  }
  if ((kernel.prepare == nullptr) != (kernel.activation_bytes == nullptr)) {
    return Status::error("kernel '%s' has only one of prepare and activation_bytes; expected both or none", kernel.name);
  }
  if (kernel.prepare != nullptr && kernel.format == Format::panel16) {
    return Status::error("kernel '%s' prepares activations in its own way; with panel16 their form is part of the "
                         "contract",
                         kernel.name);
  }
  return {};
}

Status check_format(const LoadedLibrary& library, const PackedFormat& format) {
  const uint32_t id = static_cast<uint32_t>(format.format);
  bool ended = false, is_name = id != 0;
  for (int i = 0; i < 4; ++i) {
    const char c = static_cast<char>(id >> (8 * i));
    is_name = is_name && (c == '\0' || (!ended && is_name_char(c)));
    ended = ended || c == '\0';
  }
  if (!is_name || (id & 0xff) == 0) {
    return Status::error("a format has the id 0x%" PRIx32 "; expected vendor_format() of one to four letters, digits, "
                         "'-' or '_'",
                         id);
  }
  const FormatName name = name_of(format.format);
  if (format.bytes == nullptr || format.pack == nullptr) {
    return Status::error("format '%s' has no function %s", name.text, format.bytes == nullptr ? "bytes" : "pack");
  }
  if (!(format.tolerance >= 0.0f && format.tolerance <= 1.0f)) {
    return Status::error("format '%s' has the tolerance %g; expected 0 to 1", name.text,
                         static_cast<double>(format.tolerance));
  }
  if (format.rows_at_once < 0) {
    return Status::error("format '%s' has rows_at_once %" PRId32 "; expected 0 or more", name.text, format.rows_at_once);
  }
  size_t count = 0;
  for (const PackedFormat& other : library.formats) count += other.format == format.format;
  if (count > 1 || find_format(format.format) != nullptr) {
    return Status::error("format '%s' occurs twice", name.text);
  }
  return {};
}

// A structure that the library and this build share. The library's may be smaller: it must contain at least the fields up to
// `last`, which every version of this interface has.
struct SharedStructure {
  const char* name;
  size_t least, bytes;
};
#define SHARED(structure, last) \
  { #structure, offsetof(structure, last) + sizeof(structure::last), sizeof(structure) }
constexpr SharedStructure kShared[] = {
    SHARED(lowbit_library, formats),
    SHARED(lowbit_format, pack),
    SHARED(lowbit_quantize_kernel, run),
    SHARED(lowbit_linear_kernel, run),
    SHARED(lowbit_embedding_kernel, run),
    SHARED(lowbit_attention_kernel, join),
    SHARED(lowbit_layout, levels),
    SHARED(lowbit_quantize_args, group_sums),
    SHARED(lowbit_prepare_args, activations),
    SHARED(lowbit_linear_args, scratch),
    SHARED(lowbit_embedding_args, out_dtype),
    SHARED(lowbit_attention_args, partial),
    SHARED(lowbit_attention_join_args, value_width),
    SHARED(lowbit_attention_write_args, value_width),
    SHARED(lowbit_pack_args, bias),
    SHARED(lowbit_unpack_args, bias),
};
#undef SHARED
constexpr size_t kSharedCount = sizeof kShared / sizeof kShared[0];
static_assert(sizeof(lowbit_sizes) == kSharedCount * sizeof(uint32_t));

Status check_sizes(const lowbit_sizes& sizes) {
  uint32_t given[kSharedCount];
  std::memcpy(given, &sizes, sizeof given);
  for (size_t i = 0; i < kSharedCount; ++i) {
    const SharedStructure& shared = kShared[i];
    const size_t least = (shared.least + alignof(void*) - 1) / alignof(void*) * alignof(void*);
    if (given[i] < least || given[i] > shared.bytes || given[i] % alignof(void*) != 0) {
      return Status::error("its structure %s has %" PRIu32 " bytes; expected %zu to %zu, a multiple of %zu: build it with the "
                           "headers of this version of lowbit",
                           shared.name, given[i], least, shared.bytes, alignof(void*));
    }
  }
  return {};
}

// Replaces zeros by their defaults.
template <class Kernel>
void fill_in(Kernel&) {}
void fill_in(EmbeddingKernel& kernel) {
  if (kernel.mappings == 0) kernel.mappings = kPlainMappings;
}
void fill_in(LinearKernel& kernel) {
  if (kernel.mappings == 0) kernel.mappings = kPlainMappings;
  if (kernel.x_types == 0) kernel.x_types = bit_of(DType::f32);
}

// Copies a table to `*memory`, and moves that pointer past the copy. `bytes`: size of the library's entries.
template <class Entry, class LibraryTable>
Table<Entry> copy_table(const LibraryTable& table, uint32_t bytes, char** memory) {
  Entry* const entries = reinterpret_cast<Entry*>(*memory);
  *memory += table.count * sizeof(Entry);
  for (size_t i = 0; i < table.count; ++i) {
    std::memset(static_cast<void*>(entries + i), 0, sizeof(Entry));
    std::memcpy(static_cast<void*>(entries + i), reinterpret_cast<const char*>(table.entries) + i * bytes, bytes);
    fill_in(entries[i]);
  }
  return {entries, table.count};
}

}  // namespace

Status check_tables(const lowbit_library& library) {
  if (library.abi != kKernelAbi) {
    return Status::error("its kernel interface is version %" PRIu32 "; this build of lowbit has version %" PRIu32,
                         library.abi, kKernelAbi);
  }
  if (Status s = check_sizes(library.sizes); !s.ok()) return s;
  if (Status s = check_name("the vendor", library.vendor); !s.ok()) return s;
  if (library.preference != Preference::before_built_in && library.preference != Preference::after_built_in) {
    return Status::error("its preference is %" PRIu32 "; expected 0 or 1", static_cast<uint32_t>(library.preference));
  }
  if (Status s = check_table("linear kernels", library.linear); !s.ok()) return s;
  if (Status s = check_table("embedding kernels", library.embedding); !s.ok()) return s;
  if (Status s = check_table("quantize kernels", library.quantize); !s.ok()) return s;
  if (Status s = check_table("attention kernels", library.attention); !s.ok()) return s;
  if (Status s = check_table("formats", library.formats); !s.ok()) return s;
  if (library.linear.count + library.embedding.count + library.quantize.count + library.attention.count +
          library.formats.count == 0) {
    return Status::error("it has no kernels and no formats");
  }
  return {};
}

size_t copy_bytes(const lowbit_library& library) {
  return library.linear.count * sizeof(LinearKernel) + library.embedding.count * sizeof(EmbeddingKernel) +
         library.quantize.count * sizeof(QuantizeKernel) + library.attention.count * sizeof(AttentionKernel) +
         library.formats.count * sizeof(PackedFormat);
}

LoadedLibrary copy_tables(const lowbit_library& library, void* memory) {
  char* next = static_cast<char*>(memory);
  LoadedLibrary copy{};
  copy.library = &library;
  copy.linear = copy_table<LinearKernel>(library.linear, library.sizes.linear_kernel, &next);
  copy.embedding = copy_table<EmbeddingKernel>(library.embedding, library.sizes.embedding_kernel, &next);
  copy.quantize = copy_table<QuantizeKernel>(library.quantize, library.sizes.quantize_kernel, &next);
  copy.attention = copy_table<AttentionKernel>(library.attention, library.sizes.attention_kernel, &next);
  copy.formats = copy_table<PackedFormat>(library.formats, library.sizes.format, &next);
  return copy;
}

Status check_kernels(const LoadedLibrary& library) {
  for (const PackedFormat& format : library.formats) {
    if (Status s = check_format(library, format); !s.ok()) return s;
  }
  Status status;
  const auto check_table = [&](const char* family, const auto& table, auto check) {
    for (size_t i = 0; status.ok() && i < table.count; ++i) {
      status = check_kernel(family, i, table.entries[i]);
      if (status.ok()) status = check(table.entries[i]);
    }
  };
  check_table("linear", library.linear, [&](const LinearKernel& kernel) { return check_linear(library, kernel); });
  check_table("embedding", library.embedding, [&](const EmbeddingKernel& kernel) {
    return check_format_and_bits(library, kernel);
  });
  check_table("quantize", library.quantize, [](const QuantizeKernel&) { return Status(); });
  check_table("attention", library.attention, check_attention);
  const auto check_unique = [&](const auto& table) {
    for (size_t i = 0; status.ok() && i < table.count; ++i) {
      const char* name = table.entries[i].name;
      if (count_of(library.linear, name) + count_of(library.embedding, name) + count_of(library.quantize, name) +
                  count_of(library.attention, name) > 1 ||
          is_built_in_or_loaded(name)) {
        status = Status::error("kernel '%s' has the name of another kernel; expected a unique name", name);
      }
    }
  };
  check_unique(library.linear);
  check_unique(library.embedding);
  check_unique(library.quantize);
  check_unique(library.attention);
  return status;
}

}  // namespace lowbit

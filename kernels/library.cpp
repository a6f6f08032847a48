// Whether a library's table can be trusted: everything that can be seen without calling its kernels.

#include "library.h"

#include <cinttypes>
#include <cstring>

#include "registry.h"

namespace lowbit {
namespace {

constexpr size_t kMostRows = 1024;
constexpr size_t kLongestName = 63;

bool is_name_char(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '-';
}

// `what` names the owner of the name in messages.
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

template <class Row>
Status check_table(const char* family, const Table<Row>& table) {
  if (table.count > kMostRows) {
    return Status::error("it has %zu %s rows; expected at most %zu", table.count, family, kMostRows);
  }
  if (table.count > 0 && table.rows == nullptr) {
    return Status::error("it has %zu %s rows at a null address", table.count, family);
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
  return false;
}

template <class Row>
size_t count_of(const Table<Row>& table, const char* name) {
  size_t count = 0;
  for (const Row& row : table) count += row.name != nullptr && std::strcmp(row.name, name) == 0;
  return count;
}

// What rows of every family have. Names are compared only after all of them were checked.
template <class Row>
Status check_row(const char* family, size_t index, const Row& row) {
  char what[48];
  std::snprintf(what, sizeof what, "%s row %zu", family, index);
  if (Status status = check_name(what, row.name); !status.ok()) return status;
  if (row.run == nullptr) return Status::error("row '%s' has no function", row.name);
  size_t count;
  const IsaName* const names = isa_names(&count);
  const IsaBits known = names[count - 1].allows;
  if ((row.isa & ~known) != 0) {
    return Status::error("row '%s' requires the ISA bits 0x%" PRIx32 "; this build knows 0x%" PRIx32, row.name, row.isa,
                         known);
  }
  return {};
}

template <class Row>
Status check_format_and_bits(const KernelLibrary& library, const Row& row) {
  if (row.format != Format::panel16 && find_format(row.format) == nullptr) {
    bool own = false;
    for (const PackedFormat& format : library.formats) own = own || format.format == row.format;
    if (!own) {
      return Status::error("row '%s' is of the format '%s' (0x%" PRIx32 "); expected panel16, or a format of this or a "
                           "loaded library",
                           row.name, name_of(row.format).text, static_cast<uint32_t>(row.format));
    }
  }
  if (row.bits < 1 || row.bits > 8) return Status::error("row '%s' has %d bits; expected 1 to 8", row.name, row.bits);
  if (row.mappings == 0 || (row.mappings & ~kAllMappings) != 0) {
    return Status::error("row '%s' reads the mappings 0x%02x; expected some of 0x%02x", row.name, row.mappings,
                         kAllMappings);
  }
  return {};
}

Status check_linear(const KernelLibrary& library, const LinearKernel& row) {
  if (Status status = check_format_and_bits(library, row); !status.ok()) return status;
  const bool n_fits = row.n_step > 0 && (kPanelRows % row.n_step == 0 || row.n_step % kPanelRows == 0);
  if (row.m_least < 1 || !n_fits) {
    return Status::error("row '%s' has the tile %d x %d; expected 1 row or more, and a divisor or multiple of %d "
                         "columns",
                         row.name, row.m_least, row.n_step, kPanelRows);
  }
  if (row.m_most != 0 && row.m_most < row.m_least) {
    return Status::error("row '%s' is for at most %d rows of m; expected 0 or at least its tile's %d", row.name,
                         row.m_most, row.m_least);
  }
  if (row.group_step != kHalfInputs && row.group_step != kBlockInputs) {
    return Status::error("row '%s' is for groups of multiples of %d inputs; expected %d or %d", row.name,
                         row.group_step, kHalfInputs, kBlockInputs);
  }
  if ((row.prepare == nullptr) != (row.activation_bytes == nullptr)) {
    return Status::error("row '%s' has only one of prepare and activation_bytes; expected both or none", row.name);
  }
  if (row.prepare != nullptr && row.format == Format::panel16) {
    return Status::error("row '%s' prepares activations in its own way; with panel16 their form is part of the "
                         "contract",
                         row.name);
  }
  return {};
}

Status check_format(const KernelLibrary& library, const PackedFormat& format) {
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
  size_t count = 0;
  for (const PackedFormat& other : library.formats) count += other.format == format.format;
  if (count > 1 || find_format(format.format) != nullptr) {
    return Status::error("format '%s' is there twice", name.text);
  }
  return {};
}

Status check_sizes(const AbiSizes& found) {
  constexpr AbiSizes expected = KernelLibrary{}.sizes;
  constexpr const char* kNames[] = {"KernelLibrary", "PackedFormat", "QuantizeKernel", "LinearKernel",
                                    "EmbeddingKernel", "QuantizeArgs", "PrepareArgs", "LinearArgs",
                                    "EmbeddingArgs", "PackArgs", "UnpackArgs"};
  constexpr size_t count = sizeof expected / sizeof(uint32_t);
  static_assert(sizeof kNames / sizeof kNames[0] == count);
  uint32_t a[count], b[count];
  std::memcpy(a, &found, sizeof a);
  std::memcpy(b, &expected, sizeof b);
  for (size_t i = 0; i < count; ++i) {
    if (a[i] != b[i]) {
      return Status::error("its structure %s has %" PRIu32 " bytes; expected %" PRIu32
                           ": build it with the headers of this version of lowbit",
                           kNames[i], a[i], b[i]);
    }
  }
  return {};
}

}  // namespace

Status check_library(const KernelLibrary& library) {
  if (library.abi != kKernelAbi) {
    return Status::error("its kernel interface is version %" PRIu32 "; this build of lowbit has version %" PRIu32,
                         library.abi, kKernelAbi);
  }
  if (Status s = check_sizes(library.sizes); !s.ok()) return s;
  if (Status s = check_name("the vendor", library.vendor); !s.ok()) return s;
  if (library.preference != Preference::before_built_in && library.preference != Preference::after_built_in) {
    return Status::error("its preference is %" PRIu32 "; expected 0 or 1", static_cast<uint32_t>(library.preference));
  }
  if (Status s = check_table("linear", library.linear); !s.ok()) return s;
  if (Status s = check_table("embedding", library.embedding); !s.ok()) return s;
  if (Status s = check_table("quantize", library.quantize); !s.ok()) return s;
  if (Status s = check_table("format", library.formats); !s.ok()) return s;
  if (library.linear.count + library.embedding.count + library.quantize.count + library.formats.count == 0) {
    return Status::error("it has no rows and no formats");
  }
  for (const PackedFormat& format : library.formats) {
    if (Status s = check_format(library, format); !s.ok()) return s;
  }
  Status status;
  const auto check_rows = [&](const char* family, const auto& table, auto check) {
    for (size_t i = 0; status.ok() && i < table.count; ++i) {
      status = check_row(family, i, table.rows[i]);
      if (status.ok()) status = check(table.rows[i]);
    }
  };
  check_rows("linear", library.linear, [&](const LinearKernel& row) { return check_linear(library, row); });
  check_rows("embedding", library.embedding, [&](const EmbeddingKernel& row) {
    return check_format_and_bits(library, row);
  });
  check_rows("quantize", library.quantize, [](const QuantizeKernel&) { return Status(); });
  const auto check_unique = [&](const auto& table) {
    for (size_t i = 0; status.ok() && i < table.count; ++i) {
      const char* name = table.rows[i].name;
      if (count_of(library.linear, name) + count_of(library.embedding, name) + count_of(library.quantize, name) > 1 ||
          is_built_in_or_loaded(name)) {
        status = Status::error("row '%s' has the name of another row; expected a name of its own", name);
      }
    }
  };
  check_unique(library.linear);
  check_unique(library.embedding);
  check_unique(library.quantize);
  return status;
}

}  // namespace lowbit

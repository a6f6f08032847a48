#include "tokens_file.h"

#include <algorithm>
#include <cinttypes>
#include <cstring>

#include "../plan/plan.h"
#include "utf8.h"

namespace lowbit::text {
namespace {

constexpr char kMagic[] = "lowbit tokens\n\0";  // and the zero at its end: 16 bytes
constexpr uint32_t kVersion = 1;
constexpr size_t kSections = 11, kHeader = 24, kEntry = 16;
constexpr uint32_t kMostCharacters = 0x110000;

uint64_t word_at(const void* data, size_t at, size_t bytes) {
  uint64_t value = 0;
  std::memcpy(&value, static_cast<const char*>(data) + at, bytes);
  return value;
}

template <class T>
Status section(const void* data, size_t size, size_t number, Table<T>* table) {
  const uint64_t offset = word_at(data, kHeader + kEntry * number, 8), bytes = word_at(data, kHeader + kEntry * number + 8, 8);
  if (offset > size || bytes > size - offset || offset % 8 != 0 || bytes % sizeof(T) != 0) {
    return Status::error("table %zu of the tokens file has %" PRIu64 " bytes at %" PRIu64
                         "; expected whole entries within the file's %zu", number, bytes, offset, size);
  }
  *table = {reinterpret_cast<const T*>(static_cast<const char*>(data) + offset), bytes / sizeof(T)};
  return {};
}

Status wrong(const char* what) { return Status::error("the tokens file has %s; it is damaged", what); }

// A pattern's jumps lead forward or back within the code, and it ends with a match.
Status check_code(const TokensFile& file) {
  const uint32_t size = static_cast<uint32_t>(file.code.size), classes = static_cast<uint32_t>(file.classes.size());
  for (const PatternStep& each : file.code) {
    bool fits = true;
    switch (static_cast<PatternOp>(each.op)) {
      case PatternOp::one:
      case PatternOp::behind:
      case PatternOp::not_behind: fits = each.a < classes; break;
      case PatternOp::greedy:
      case PatternOp::possessive: fits = each.a < classes && each.b <= each.c; break;
      case PatternOp::either: fits = each.a < size && each.b < size; break;
      case PatternOp::jump:
      case PatternOp::ahead:
      case PatternOp::not_ahead: fits = each.a < size; break;
      default: fits = each.op < static_cast<uint32_t>(PatternOp::count);
    }
    if (!fits) return wrong("a pattern with a step that does not exist");
  }
  if (size > 0 && static_cast<PatternOp>(file.code[size - 1].op) != PatternOp::match) return wrong("a pattern without an end");
  return {};
}

}  // namespace

bool CharacterClass::has(uint32_t character) const {
  if (character < 128) return ascii[character / 64] >> (character % 64) & 1;
  uint32_t low = 0, high = count;  // the first range that ends after the character
  while (low < high) {
    const uint32_t middle = (low + high) / 2;
    if (ranges[2 * middle + 1] > character) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low < count && ranges[2 * low] <= character;
}

Status TokensFile::read(const void* data, size_t size) {
  if (size < kHeader + kEntry * kSections || std::memcmp(data, kMagic, 16) != 0) {
    return Status::error("the file does not begin like a tokens file; expected one that lowbit export wrote");
  }
  if (const uint64_t version = word_at(data, 16, 4); version != kVersion) {
    return Status::error("the tokens file has version %" PRIu64 "; expected %u, of this program", version, kVersion);
  }
  if (word_at(data, 20, 4) != checksum(static_cast<const char*>(data) + kHeader, size - kHeader)) {
    return wrong("another checksum than its bytes");
  }
  Table<Pair> spans;
  Table<uint32_t> ranges;
  Status status;
  const auto take = [&](size_t number, auto* table) {
    if (status.ok()) status = section(data, size, number, table);
  };
  take(0, &head), take(1, &ends), take(2, &bytes), take(3, &order), take(4, &merges), take(5, &scores), take(6, &ranges);
  take(7, &spans), take(8, &code), take(9, &maps), take(10, &compositions);
  if (!status.ok()) return status;
  if (ends.size == 0 || ends.size >= kNone / 4 || bytes.size >= kNone) return wrong("no texts, or too many");
  text_count = static_cast<uint32_t>(ends.size);
  for (uint32_t i = 0, before = 0; i < text_count; before = ends[i++]) {
    if (ends[i] < before || ends[i] > bytes.size) return wrong("texts that are not in it");
    if (first_wrong(text(i)) != text(i).size()) return wrong("a text that is not UTF-8");
  }
  const auto has = [&](uint32_t index) { return index < text_count; };
  if (!std::all_of(order.begin(), order.end(), has)) return wrong("tokens without a text");
  for (const Merge& each : merges) {
    if (!has(each.left) || !has(each.right) || !has(each.token)) return wrong("merges of tokens without a text");
  }
  for (const Pair& each : spans) {
    if (each.from > ranges.size / 2 || each.to > ranges.size / 2 - each.from) return wrong("classes of missing ranges");
    classes.push_back({ranges.data + 2 * each.from, each.to, {0, 0}});
    CharacterClass& made = classes.back();
    for (uint32_t i = 0; i < made.count; ++i) {
      for (uint32_t c = made.ranges[2 * i]; c < std::min(made.ranges[2 * i + 1], 128u); ++c) {
        made.ascii[c / 64] |= uint64_t{1} << (c % 64);
      }
    }
  }
  for (const Composition& each : compositions) {
    if (each.character >= kMostCharacters) return wrong("a composition whose character does not exist");
  }
  return check_code(*this);
}

uint32_t Head::take() {
  if (at_ < file_.head.size) return file_.head[at_++];
  if (status_.ok()) status_ = wrong("too few settings");
  return 0;
}

uint32_t Head::number(const char* name, uint32_t least, uint32_t most) {
  const uint32_t value = take();
  if (value >= least && value <= most) return value;
  if (status_.ok()) {
    status_ = Status::error("%s in the tokens file is %" PRIu32 "; expected %" PRIu32 " to %" PRIu32, name, value, least,
                            most);
  }
  return least;
}

uint32_t Head::or_none(const char* name, uint32_t below) {
  const uint32_t value = take();
  if (value == kNone || value < below) return value;
  if (status_.ok()) {
    status_ = Status::error("%s in the tokens file is %" PRIu32 "; expected less than %" PRIu32, name, value, below);
  }
  return kNone;
}

double Head::real(const char* name) {
  const uint64_t low = take(), bits = low | static_cast<uint64_t>(take()) << 32;
  double value;
  std::memcpy(&value, &bits, sizeof value);
  if (value - value == 0.0) return value;
  if (status_.ok()) status_ = Status::error("%s in the tokens file is not finite", name);
  return 0.0;
}

}  // namespace lowbit::text

#include <array>
#include <cinttypes>
#include <cstring>

#include "plan.h"

namespace lowbit {
namespace {

constexpr char kMagic[] = "lowbit plan\n";
constexpr int64_t kVersion = 1;  // changes with the numbers of operators and instructions, too
// More than any model has; these limits keep a damaged file from requesting unlimited memory.
constexpr int64_t kMostBuffers = 1 << 20, kMostSteps = 1 << 20, kMostOperands = 64, kMostNumbers = 4096;
constexpr int64_t kMostOperandsInAll = 1 << 20;
constexpr int64_t kMostExtent = int64_t{1} << 48;

// Reads numbers of variable length (LEB128, zigzag) and bytes. After an error every number is 0.
class Reader {
 public:
  Reader(const uint8_t* bytes, size_t size) : at_(bytes), end_(bytes + size) {}

  int64_t number() {
    uint64_t value = 0;
    for (int shift = 0; shift < 64; shift += 7) {
      if (at_ == end_) break;
      const uint8_t byte = *at_++;
      value |= static_cast<uint64_t>(byte & 0x7f) << shift;
      if ((byte & 0x80) == 0) return static_cast<int64_t>(value >> 1) ^ -static_cast<int64_t>(value & 1);
    }
    failed_ = true;
    at_ = end_;
    return 0;
  }

  // A number from `least` to `most`.
  int64_t number(const char* name, int64_t least, int64_t most) {
    const int64_t value = number();
    if (!failed_ && status_.ok() && (value < least || value > most)) {
      status_ = Status::error("%s is %" PRId64 "; expected %" PRId64 " to %" PRId64, name, value, least, most);
    }
    return value < least || value > most ? least : value;
  }

  Extent extent() {
    Extent extent;
    extent.constant = number("a size", -kMostExtent, kMostExtent);
    extent.per_row = number("a size per row", -kMostExtent, kMostExtent);
    extent.per_kept = number("a size per kept row", -kMostExtent, kMostExtent);
    return extent;
  }

  const char* bytes(int64_t size) {
    if (size < 0 || size > end_ - at_) {
      failed_ = true;
      at_ = end_;
      return nullptr;
    }
    const char* const result = reinterpret_cast<const char*>(at_);
    at_ += size;
    return result;
  }

  std::string text() {
    const int64_t size = number("the length of a text", 0, 4096);
    const char* const from = bytes(size);
    return from == nullptr ? std::string() : std::string(from, static_cast<size_t>(size));
  }

  ElementType element_type() {
    return static_cast<ElementType>(number("an element type", 0, static_cast<int64_t>(ElementType::boolean)));
  }

  double real() {
    double value = 0.0;
    if (const char* const from = bytes(8)) std::memcpy(&value, from, 8);
    return value;
  }

  bool fails() const { return failed_ || !status_.ok(); }
  bool at_end() const { return at_ == end_; }
  Status status() const {
    if (!status_.ok()) return status_;
    return failed_ ? Status::error("the plan ends in the middle of a number or text") : Status();
  }

 private:
  const uint8_t *at_, *end_;
  bool failed_ = false;
  Status status_;
};

void read_buffer(Reader& reader, Buffer* buffer) {
  buffer->kind = static_cast<BufferKind>(reader.number("a buffer's kind", 0, kBufferKinds - 1));
  buffer->bytes = reader.extent();
  buffer->index = reader.number("a buffer's number", 0, kMostBuffers);
  buffer->slot = reader.number("a cache's slot", 0, 64);
  buffer->name = reader.text();
  const int64_t size = reader.number();
  if (const char* const content = reader.bytes(size)) buffer->content.assign(content, content + size);
  buffer->file = reader.text();
  buffer->offset = reader.number("an offset in a file", 0, kMostExtent);
  buffer->checksum = static_cast<uint32_t>(reader.number("a checksum", 0, UINT32_MAX));
  buffer->shape.resize(static_cast<size_t>(reader.number("the dimensions of a cache", 0, kPlanDims)));
  for (int64_t& each : buffer->shape) each = reader.number("a dimension of a cache", 1, 1 << 24);
  buffer->type = reader.element_type();
}

void read_operand(Reader& reader, int64_t buffers, Operand* operand) {
  operand->buffer = reader.number("an operand's buffer", -1, buffers - 1);
  if (operand->buffer < 0) return;
  operand->type = reader.element_type();
  operand->ndim = static_cast<int>(reader.number("the number of dimensions", 0, kPlanDims));
  operand->offset = reader.extent();
  for (int d = 0; d < operand->ndim; ++d) {
    operand->size[d] = reader.extent();
    operand->stride[d] = reader.extent();
  }
}

void read_step(Reader& reader, int64_t buffers, PlanStep* step) {
  step->op = static_cast<Opcode>(reader.number("an operator", 0, kOpcodes - 1));
  step->operands.resize(static_cast<size_t>(reader.number("the number of operands", 1, kMostOperands)));
  for (Operand& operand : step->operands) read_operand(reader, buffers, &operand);
  step->integers.resize(static_cast<size_t>(reader.number("the number of integers", 0, kMostNumbers)));
  for (int64_t& integer : step->integers) integer = reader.number();
  step->numbers.resize(static_cast<size_t>(reader.number("the number of constants", 0, kMostNumbers)));
  for (double& number : step->numbers) number = reader.real();
}

Status read_checked(const uint8_t* bytes, size_t size, Plan* plan) {
  constexpr size_t kMagicBytes = sizeof kMagic - 1;
  if (size < kMagicBytes || std::memcmp(bytes, kMagic, kMagicBytes) != 0) {
    return Status::error("the file does not begin with 'lowbit plan'; expected a plan that lowbit wrote");
  }
  Reader reader(bytes + kMagicBytes, size - kMagicBytes);
  if (const int64_t version = reader.number(); version != kVersion) {
    return Status::error("the plan has version %" PRId64 "; expected %" PRId64, version, kVersion);
  }
  uint32_t expected;
  if (size < kMagicBytes + sizeof expected) return Status::error("the plan ends after its version");
  std::memcpy(&expected, bytes + size - sizeof expected, sizeof expected);
  if (checksum(bytes, size - sizeof expected) != expected) {
    return Status::error("the plan's checksum does not fit its bytes; expected a file as it was written");
  }
  reader = Reader(bytes + kMagicBytes, size - kMagicBytes - sizeof expected);
  reader.number();
  const int64_t facts = reader.number("the number of facts", 0, kMostNumbers);
  for (int64_t i = 0; i < facts && !reader.fails(); ++i) {
    std::vector<int64_t>& values = plan->about[reader.text()];
    values.resize(static_cast<size_t>(reader.number("the number of values", 0, kMostNumbers)));
    for (int64_t& value : values) value = reader.number();
  }
  const int64_t buffers = reader.number("the number of buffers", 1, kMostBuffers);
  for (int64_t i = 0; i < buffers && !reader.fails(); ++i) read_buffer(reader, &plan->buffers.emplace_back());
  const int64_t steps = reader.number("the number of steps", 1, kMostSteps);
  int64_t operands = 0;
  for (int64_t i = 0; i < steps && !reader.fails(); ++i) {
    read_step(reader, buffers, &plan->steps.emplace_back());
    operands += static_cast<int64_t>(plan->steps.back().operands.size());
    if (operands > kMostOperandsInAll) {
      return Status::error("the plan has more than %" PRId64 " operands; expected fewer", kMostOperandsInAll);
    }
  }
  if (Status status = reader.status(); !status.ok()) return status;
  return reader.at_end() ? Status() : Status::error("the plan has bytes after its last step");
}

}  // namespace

uint32_t checksum(const void* bytes, size_t size, uint32_t from) {
  static const std::array<uint32_t, 256> table = [] {
    std::array<uint32_t, 256> result;
    for (uint32_t i = 0; i < 256; ++i) {
      result[i] = i;
      for (int bit = 0; bit < 8; ++bit) result[i] = result[i] >> 1 ^ (0xedb88320u & (0u - (result[i] & 1)));
    }
    return result;
  }();
  uint32_t crc = ~from;
  for (size_t i = 0; i < size; ++i) crc = crc >> 8 ^ table[(crc ^ static_cast<const uint8_t*>(bytes)[i]) & 0xff];
  return ~crc;
}

Status read_plan(const void* bytes, size_t size, Plan* plan) {
  *plan = {};
  try {
    return read_checked(static_cast<const uint8_t*>(bytes), size, plan);
  } catch (const std::bad_alloc&) {
    return Status::no_memory("no memory for a plan of %" PRId64 " bytes", static_cast<int64_t>(size));
  }
}

}  // namespace lowbit

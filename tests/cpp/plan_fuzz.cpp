// Reads and runs plans with random damage and a right checksum. Each is refused with a sentence, or runs within its memory: all
// buffers have exact sizes, so that AddressSanitizer detects any other access (`make fuzz-plan`).
//
//   plan_fuzz [EXECUTIONS [SEED [FIRST]]]   the executions FIRST, FIRST + 1, ... of a seed
//
// Compiled with LOWBIT_GUIDED it is a libFuzzer target, whose inputs are plans without their checksum.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>

#include "support/plan_writer.h"
#include "support/random.h"

namespace lowbit::test {
namespace {

// Larger calls take long, and say nothing more.
constexpr int64_t kMostElements = 1 << 12, kMostBytes = 1 << 20;

int64_t at(const Extent& extent, int64_t rows, int64_t kept) {
  const double value = static_cast<double>(extent.constant) + static_cast<double>(extent.per_row) * static_cast<double>(rows) +
                       static_cast<double>(extent.per_kept) * static_cast<double>(kept);
  return value > 1e15 ? int64_t{1} << 60 : value < -1e15 ? -(int64_t{1} << 60) : static_cast<int64_t>(value);
}

bool is_small(const Plan& plan, int64_t rows, int64_t kept) {
  for (const Buffer& buffer : plan.buffers) {
    if (buffer.kind != BufferKind::cache && at(buffer.bytes, rows, kept) > kMostBytes) return false;
  }
  for (const PlanStep& step : plan.steps) {
    for (const Operand& operand : step.operands) {
      double elements = 1.0;
      for (int d = 0; d < operand.ndim; ++d) elements *= static_cast<double>(at(operand.size[d], rows, kept));
      if (std::fabs(elements) > static_cast<double>(kMostElements)) return false;
    }
  }
  return true;
}

// Bytes that a call must give each input or output, as the plan's views say; at most kMostBytes.
int64_t needed(const Plan& plan, int64_t buffer, int64_t rows, int64_t kept) {
  int64_t most = 0;
  for (const PlanStep& step : plan.steps) {
    for (const Operand& operand : step.operands) {
      if (operand.buffer != buffer) continue;
      double last = static_cast<double>(at(operand.offset, rows, kept));
      bool empty = false;
      for (int d = 0; d < operand.ndim; ++d) {
        const double size = static_cast<double>(at(operand.size[d], rows, kept));
        empty = empty || size == 0.0;
        last += std::fmax(0.0, static_cast<double>(at(operand.stride[d], rows, kept)) * (size - 1.0));
      }
      const double bytes = (last + 1.0) * static_cast<double>(element_bytes(operand.type));
      if (!empty && bytes < static_cast<double>(kMostBytes)) most = std::max(most, static_cast<int64_t>(bytes));
    }
  }
  return most;
}

struct Counts {
  int64_t refused = 0, read = 0, small = 0, run = 0;
};

using Bytes = std::unique_ptr<uint8_t[]>;

Bytes filled(int64_t size, Random& random) {
  Bytes bytes(new uint8_t[static_cast<size_t>(size)]);
  for (int64_t i = 0; i < size; ++i) {
    bytes[static_cast<size_t>(i)] = random.below(4) == 0 ? static_cast<uint8_t>(random.next()) : 0;
  }
  return bytes;
}

void execute(const std::string& content, uint64_t seed, Counts* counts) {
  const std::string file = with_checksum(content);
  const std::unique_ptr<char[]> exact(new char[file.size()]);
  std::copy(file.begin(), file.end(), exact.get());
  Plan plan;
  const Status status = read_plan(exact.get(), file.size(), &plan);
  if (!status.ok()) {
    if (status.message()[0] == '\0') std::abort();
    ++counts->refused;
    return;
  }
  ++counts->read;
  Random random(seed);
  const int64_t rows = random.between(int64_t{1}, int64_t{6}), kept = random.between(0, rows);
  if (!is_small(plan, rows, kept)) return;
  ++counts->small;
  std::vector<Bytes> kept_alive;
  std::vector<TensorView> caches;
  std::vector<Memory> inputs, outputs, weights(plan.buffers.size());
  for (size_t i = 0; i < plan.buffers.size(); ++i) {
    const Buffer& buffer = plan.buffers[i];
    if (buffer.kind == BufferKind::cache) {
      const bool is_attention = buffer.slot < kHeld;
      const std::vector<int64_t> shape = is_attention ? std::vector<int64_t>{1, 2, 16, 16} : std::vector<int64_t>{1, 2, 32};
      TensorView& view = caches.emplace_back();
      view.type = ElementType::f32;
      view.shape.ndim = static_cast<int>(shape.size());
      std::copy(shape.begin(), shape.end(), view.shape.size);
      make_contiguous(&view);
      view.data = kept_alive.emplace_back(filled(4 * view.shape.numel(), random)).get();
    } else if (buffer.kind == BufferKind::input || buffer.kind == BufferKind::output) {
      if (buffer.index > 16) continue;
      std::vector<Memory>& list = buffer.kind == BufferKind::input ? inputs : outputs;
      if (list.size() <= static_cast<size_t>(buffer.index)) list.resize(static_cast<size_t>(buffer.index) + 1);
      Memory& memory = list[static_cast<size_t>(buffer.index)];
      const int64_t bytes = needed(plan, static_cast<int64_t>(i), rows, kept);
      if (bytes > memory.bytes) memory = {kept_alive.emplace_back(filled(bytes, random)).get(), bytes};
    } else if (buffer.kind == BufferKind::weight && buffer.bytes.constant > 0) {
      const int64_t bytes = std::min(buffer.bytes.constant, kMostBytes);
      weights[i] = {kept_alive.emplace_back(filled(bytes, random)).get(), bytes};
    }
  }
  PlanRun run(std::move(plan), 1);
  for (size_t i = 0; i < weights.size(); ++i) {
    if (weights[i].data != nullptr && !run.bind(static_cast<int64_t>(i), weights[i]).ok()) return;
  }
  const int64_t cut = rows > 1 && random.below(2) != 0 ? random.between(1, rows - 1) : rows;
  const PlanText texts[] = {{0, cut, random.between(int64_t{0}, int64_t{10}), caches.data()}, {cut, rows, 0, caches.data()}};
  const PlanCall call{rows, kept, inputs.data(), static_cast<int64_t>(inputs.size()), outputs.data(),
                      static_cast<int64_t>(outputs.size()), texts, cut < rows ? 2 : 1};
  const Status result = run.run(call);
  if (!result.ok() && result.message()[0] == '\0') std::abort();
  counts->run += result.ok();
}

// A plan with every operator that needs no packed matrix.
Plan varied_plan() {
  constexpr ElementType f32 = ElementType::f32, i64 = ElementType::i64;
  Plan plan;
  plan.buffers = {buffer(BufferKind::input, {}, 0), floats(std::vector<float>(16, 0.5f))};
  const auto made = [&](const Extent& bytes) {
    plan.buffers.push_back(buffer(BufferKind::temporary, bytes));
    return static_cast<int64_t>(plan.buffers.size()) - 1;
  };
  const Operand x = operand(0, f32, {kRows, {16}}), weight = operand(1, f32, {{16}});
  const Operand normed = operand(made(times(kRows, 64)), f32, {kRows, {16}});
  const Operand active = operand(made(times(kRows, 64)), f32, {kRows, {16}});
  const Operand total = operand(made(times(kRows, 4)), f32, {kRows});
  const Operand values = operand(made(times(kRows, 8)), f32, {kRows, {2}});
  const Operand places = operand(made(times(kRows, 16)), i64, {kRows, {2}});
  const Operand taken = operand(made(times(kRows, 8)), f32, {kRows, {2}});
  const Operand count = operand(made(times(kRows, 8)), i64, {kRows});
  const Operand rows = operand(made(times(kRows, 64)), f32, {kRows, {16}});
  const Operand range = operand(made({16}), i64, {{2}}), pooled = operand(made({64}), f32, {{1}, {16}});
  const Operand ranges = operand(range.buffer, i64, {{1}, {2}}), texts = operand(rows.buffer, f32, {{1}, kRows, {16}});
  plan.buffers.push_back(buffer(BufferKind::output, {}, 0));
  const Operand out = operand(static_cast<int64_t>(plan.buffers.size()) - 1, f32, {kRows, {16}});
  plan.steps = {{Opcode::rms_norm, {x, weight, normed}, {}, {1e-5, 0.0}}, {Opcode::activate, {normed, x, active}, {0}, {}},
                {Opcode::sum, {active, total}, {}, {}},                   {Opcode::top, {active, values, places}, {}, {}},
                {Opcode::gather, {active, places, taken}, {}, {}},        {Opcode::count_up, {count}, {}, {0.0, 1.0}},
                {Opcode::take, {active, count, rows}, {}, {}},            {Opcode::copy, {rows, out}, {}, {}},
                {Opcode::scatter, {places, out}, {}, {3.0}},              {Opcode::count_up, {range}, {}, {0.0, 1.0}},
                {Opcode::pool, {texts, ranges, pooled}, {0}, {}}};
  return plan;
}

std::string content_of(const Plan& plan) {
  const std::string bytes = bytes_of(plan);
  return bytes.substr(0, bytes.size() - 4);
}

std::string damaged(std::string bytes, Random& random) {
  constexpr int64_t kHeader = 13;
  for (int64_t changes = random.between(int64_t{1}, int64_t{4}); changes > 0; --changes) {
    const size_t place = static_cast<size_t>(random.between(kHeader, static_cast<int64_t>(bytes.size()) - 1));
    switch (random.below(5)) {
      case 0: bytes[place] = static_cast<char>(bytes[place] ^ 1 << random.below(8)); break;
      case 1: bytes[place] = static_cast<char>(random.next()); break;
      case 2: bytes.insert(place, 1, static_cast<char>(random.next())); break;
      case 3: bytes.erase(place, 1); break;
      default: bytes[place] = static_cast<char>(bytes[place] + (random.below(2) != 0 ? 2 : -2));  // the next number
    }
    if (bytes.size() <= kHeader) break;
  }
  return bytes;
}

}  // namespace
}  // namespace lowbit::test

using namespace lowbit::test;

#ifdef LOWBIT_GUIDED
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Counts counts;
  execute(std::string(reinterpret_cast<const char*>(data), size), checksum(data, size), &counts);
  return 0;
}
#else
int main(int argc, char** argv) {
  const int64_t count = argc > 1 ? std::strtoll(argv[1], nullptr, 10) : 20000;
  const uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
  const int64_t first = argc > 3 ? std::strtoll(argv[3], nullptr, 10) : 0;
  const std::string plans[] = {content_of(small_plan()), content_of(plan_with_caches()), content_of(varied_plan())};
  Counts counts, whole;
  for (const std::string& each : plans) execute(each, seed, &whole);
  if (whole.run != 3) {
    std::fprintf(stderr, "%lld undamaged plans run; expected 3\n", static_cast<long long>(whole.run));
    return 1;
  }
  for (int64_t i = first; i < first + count; ++i) {
    Random random(seed * 0x9e3779b97f4a7c15u + static_cast<uint64_t>(i));
    execute(damaged(plans[i % 3], random), random.next(), &counts);
  }
  std::printf("%lld plans: %lld refused by read_plan, %lld read, %lld small, %lld ran\n", static_cast<long long>(count),
              static_cast<long long>(counts.refused), static_cast<long long>(counts.read), static_cast<long long>(counts.small),
              static_cast<long long>(counts.run));
  return counts.run > 0 || count < 1000 ? 0 : 1;
}
#endif

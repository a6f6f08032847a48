// Plans: reading damaged files, and running plans that do not fit their memory.

#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "support/plan_writer.h"
#include "support/tensors.h"

namespace lowbit::test {
namespace {

constexpr ElementType kF32 = ElementType::f32;

// Reads bytes of an exact size, so that a read beyond them stops the test.
Status read(const std::string& bytes, Plan* plan) {
  Guarded memory(static_cast<int64_t>(bytes.size()));
  if (!bytes.empty()) std::memcpy(memory.data(), bytes.data(), bytes.size());
  return read_plan(memory.data(), bytes.size(), plan);
}

Plan plan_of(const std::function<void(Plan&)>& change) {
  Plan plan = small_plan();
  change(plan);
  return plan;
}

// A plan, its weights, and memory of exact sizes for its calls.
struct Bound {
  std::unique_ptr<PlanRun> run;
  Tensor weight;
  int64_t cache_count = 0;

  explicit Bound(const Plan& plan, int threads = 1, bool bound = true) : weight(kF32, {6, 8}) {
    Plan copy;
    const Status status = read(bytes_of(plan), &copy);
    EXPECT_TRUE(status.ok()) << status.message();
    run = std::make_unique<PlanRun>(std::move(copy), threads);
    Random random(1);
    for (int64_t i = 0; i < 48; ++i) weight.memory->as<float>()[i] = random.normal();
    weight.memory->freeze();
    for (size_t i = 0; bound && i < plan.buffers.size(); ++i) {
      if (plan.buffers[i].kind != BufferKind::weight) continue;
      EXPECT_TRUE(run->bind(static_cast<int64_t>(i), {weight.view.data, 192}).ok());
    }
  }

  // `out`: [kept, 6]. The kept rows are the last ones.
  Status call(int64_t rows, int64_t kept, std::vector<float>* out, uint64_t seed = 7) {
    Random random(seed);
    const Tensor x = random_tensor(kF32, {rows, 8}, random);
    std::vector<int64_t> last;
    for (int64_t i = 0; i < kept; ++i) last.push_back(rows - kept + i);
    const Tensor keep = index_tensor(last);
    Tensor result(kF32, {kept, 6});
    const Memory inputs[] = {{x.view.data, rows * 32}, {keep.view.data, kept * 8}}, outputs[] = {{result.view.data, kept * 24}};
    const PlanText text{0, rows, 0, nullptr};
    const Status status = run->run({rows, kept, inputs, 2, outputs, 1, &text, 1});
    out->assign(result.memory->as<float>(), result.memory->as<float>() + kept * 6);
    EXPECT_TRUE(x.memory->intact() && keep.memory->intact() && result.memory->intact() && weight.memory->intact());
    return status;
  }
  Status call() {
    std::vector<float> out;
    return call(4, 2, &out);
  }
};

TEST(ReadPlan, EveryPrefixIsRefused) {
  for (const Plan& plan : {small_plan(), plan_with_caches()}) {
    const std::string bytes = bytes_of(plan);
    Plan back;
    ASSERT_TRUE(read(bytes, &back).ok());
    EXPECT_EQ(bytes_of(back), bytes) << "what is read is what was written";
    for (size_t size = 0; size < bytes.size(); ++size) {
      EXPECT_FALSE(read(bytes.substr(0, size), &back).ok()) << size;
      if (size + 4 > bytes.size()) continue;
      EXPECT_FALSE(read(with_checksum(bytes.substr(0, size)), &back).ok() && size + 4 != bytes.size()) << size;
    }
  }
}

TEST(ReadPlan, ChangedBytes) {
  const std::string bytes = bytes_of(small_plan());
  const std::string content = bytes.substr(0, bytes.size() - 4);
  Plan plan;
  for (size_t at = 0; at < bytes.size(); ++at) {
    for (int bit = 0; bit < 8; ++bit) {
      std::string changed = bytes;
      changed[at] = static_cast<char>(changed[at] ^ 1 << bit);
      const Status status = read(changed, &plan);
      ASSERT_FALSE(status.ok()) << "a checksum finds each changed bit";
      if (at >= content.size()) continue;
      if (read(with_checksum(changed.substr(0, content.size())), &plan).ok()) {
        Plan again;
        ASSERT_TRUE(read(bytes_of(plan), &again).ok()) << "a plan that is accepted can be written and read";
      }
    }
  }
  EXPECT_TRUE(refused(read("", &plan), "does not begin with 'lowbit plan'"));
  EXPECT_TRUE(refused(read("lowbit plan\n", &plan), "version 0"));
  EXPECT_TRUE(refused(read("lowbit plan\n\x02", &plan), "ends after its version"));
  std::string newer = content;
  newer[12] = 4;
  EXPECT_TRUE(refused(read(with_checksum(newer), &plan), "version 2; expected 1"));
  EXPECT_TRUE(refused(read(with_checksum(content + '\0'), &plan), "bytes after its last step"));
}

// CRC-32 of the standard's example.
TEST(ReadPlan, Checksum) { EXPECT_EQ(checksum("123456789", size_t{9}), 0xcbf43926u); }

// Counts that a short file cannot have. They are refused before memory is allocated for them.
TEST(ReadPlan, HugeCounts) {
  const auto refuses = [](const std::function<void(PlanWriter&)>& write, const char* says) {
    PlanWriter to;
    to.number(1);
    write(to);
    Plan plan;
    return refused(read(with_checksum(to.bytes), &plan), says);
  };
  for (const int64_t count : {int64_t{-1}, int64_t{1} << 13, INT64_MAX, INT64_MIN}) {
    EXPECT_TRUE(refuses([&](PlanWriter& to) { to.number(count); }, "the number of facts"));
    EXPECT_TRUE(refuses([&](PlanWriter& to) { to.numbers({1, 0, count}); }, "the number of values"));
    EXPECT_TRUE(refuses([&](PlanWriter& to) { to.numbers({1, count}); }, "the length of a text"));
  }
  EXPECT_TRUE(refuses([](PlanWriter& to) { to.numbers({4096, 0, 4096}); }, "ends in the middle"));
  for (const int64_t count : {int64_t{0}, int64_t{-1}, int64_t{1} << 21, INT64_MAX, INT64_MIN}) {
    EXPECT_TRUE(refuses([&](PlanWriter& to) { to.numbers({0, count}); }, "the number of buffers"));
  }
  EXPECT_TRUE(refuses([](PlanWriter& to) { to.numbers({0, 1 << 20}); }, "ends in the middle"));
  // Kind, size, number, slot, name, content, file, offset, checksum, shape and type.
  const std::vector<int64_t> usual = {5, 8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0};
  const auto buffer = [&](PlanWriter& to) {
    to.numbers({0, 1});
    for (const int64_t each : usual) to.number(each);
  };
  const auto with = [&](size_t at, int64_t value, const char* says) {
    return refuses([&](PlanWriter& to) {
      to.numbers({0, 1});
      for (size_t i = 0; i < at; ++i) to.number(usual[i]);
      to.number(value);
    }, says);
  };
  for (const int64_t kind : {-1, 6, 200}) EXPECT_TRUE(with(0, kind, "a buffer's kind"));
  for (size_t i = 1; i < 4; ++i) EXPECT_TRUE(with(i, int64_t{1} << 50, "a size"));
  EXPECT_TRUE(with(4, -1, "a buffer's number"));
  EXPECT_TRUE(with(5, 65, "a cache's slot"));
  for (const size_t text : {6, 8}) EXPECT_TRUE(with(text, 5000, "the length of a text"));
  for (const int64_t size : {int64_t{-1}, int64_t{100}, INT64_MAX, INT64_MIN}) EXPECT_TRUE(with(7, size, "ends in the middle"));
  EXPECT_TRUE(with(9, -1, "an offset in a file"));
  EXPECT_TRUE(with(10, int64_t{1} << 32, "a checksum"));
  EXPECT_TRUE(with(11, 9, "the dimensions of a cache"));
  EXPECT_TRUE(with(12, 10, "an element type"));
  for (const int64_t count : {int64_t{0}, int64_t{-1}, int64_t{1} << 21, INT64_MAX}) {
    EXPECT_TRUE(refuses([&](PlanWriter& to) { buffer(to); to.number(count); }, "the number of steps"));
  }
  const auto step = [&](std::initializer_list<int64_t> numbers, const char* says) {
    return refuses([&](PlanWriter& to) { buffer(to); to.number(1); to.numbers(numbers); }, says);
  };
  EXPECT_TRUE(step({kOpcodes}, "an operator"));
  EXPECT_TRUE(step({11, 0}, "the number of operands"));
  EXPECT_TRUE(step({11, 65}, "the number of operands"));
  EXPECT_TRUE(step({11, 1, 1}, "an operand's buffer"));
  EXPECT_TRUE(step({11, 1, -2}, "an operand's buffer"));
  EXPECT_TRUE(step({11, 1, 0, 10}, "an element type"));
  EXPECT_TRUE(step({11, 1, 0, 0, 9}, "the number of dimensions"));
  EXPECT_TRUE(step({11, 1, -1, 5000}, "the number of integers"));
  EXPECT_TRUE(step({11, 1, -1, 0, 5000}, "the number of constants"));
  EXPECT_TRUE(step({11, 1, -1, 0, 2}, "ends in the middle"));
  // A number that does not end, or has more than 64 bits.
  EXPECT_TRUE(refuses([](PlanWriter& to) { to.bytes.append(20, '\xff'); }, "ends in the middle"));
}

TEST(PlanRun, CallsOfAllSizes) {
  for (const int threads : {1, 2, 3}) {
    Bound run(small_plan(), threads);
    for (const int64_t rows : {1, 4, 300, 7, 2, 4, 90, 1}) {
      for (const int64_t kept : {int64_t{0}, int64_t{1}, rows / 2, rows}) {
        std::vector<float> out;
        const Status status = run.call(rows, kept, &out);
        ASSERT_TRUE(status.ok()) << status.message();
        Random random(7);
        const Tensor x = random_tensor(kF32, {rows, 8}, random);
        const float* const bias = reinterpret_cast<const float*>(run.run->plan().buffers[2].content.data());
        for (int64_t i = 0; i < kept; ++i) {
          double scores[6], total = 0.0;
          for (int64_t n = 0; n < 6; ++n) {
            double score = static_cast<double>(bias[n]);
            for (int64_t k = 0; k < 8; ++k) {
              score += static_cast<double>(x.memory->as<float>()[(rows - kept + i) * 8 + k]) *
                       static_cast<double>(run.weight.memory->as<float>()[n * 8 + k]);
            }
            total += scores[n] = std::exp(-score);
          }
          for (int64_t n = 0; n < 6; ++n) ASSERT_NEAR(out[static_cast<size_t>(i * 6 + n)], scores[n] / total, 1e-5);
        }
      }
    }
  }
}

// Each text of a call gets the bits that it gets alone, in pieces or at once.
TEST(PlanRun, TextsWithCaches) {
  struct Text {
    Tensor keys{kF32, {1, 2, 32, 16}}, values{kF32, {1, 2, 32, 16}}, state{kF32, {1, 2, 32}};
    TensorView views[4];
    Text() {
      for (Tensor* each : {&keys, &values, &state}) {
        std::memset(each->memory->data(), 0, static_cast<size_t>(each->memory->size()));
      }
      views[0] = keys.view;
      views[1] = values.view;
      views[2] = state.view;
    }
  };
  Random random(3);
  const Tensor x = random_tensor(kF32, {12, 32}, random);
  const Plan plan = plan_with_caches();
  for (const int threads : {1, 2}) {
    Plan copy = plan;
    PlanRun run(std::move(copy), threads);
    const auto call = [&](int64_t begin, int64_t end, const std::vector<PlanText>& texts) {
      Tensor out(kF32, {end - begin, 32});
      const Memory input{x.memory->data() + begin * 128, (end - begin) * 128}, output{out.view.data, (end - begin) * 128};
      const Status status = run.run({end - begin, 0, &input, 1, &output, 1, texts.data(), static_cast<int64_t>(texts.size())});
      EXPECT_TRUE(status.ok()) << status.message();
      return out.bytes();
    };
    Text a, b, a_again, b_again;
    std::vector<uint8_t> alone = call(0, 5, {{0, 5, 0, a.views}});
    const std::vector<uint8_t> of_b = call(5, 12, {{0, 7, 0, b.views}});
    alone.insert(alone.end(), of_b.begin(), of_b.end());
    EXPECT_EQ(call(0, 12, {{0, 5, 0, a_again.views}, {5, 12, 0, b_again.views}}), alone);
    EXPECT_EQ(a.keys.bytes(), a_again.keys.bytes());
    EXPECT_EQ(b.state.bytes(), b_again.state.bytes());
    std::vector<uint8_t> pieces;
    Text c;
    for (int64_t at = 0; at < 5; ++at) {
      const std::vector<uint8_t> one = call(at, at + 1, {{0, 1, at, c.views}});
      pieces.insert(pieces.end(), one.begin(), one.end());
    }
    EXPECT_EQ(pieces, std::vector<uint8_t>(alone.begin(), alone.begin() + 5 * 128));
    // A text that would not fit into its caches, and one that begins before 0.
    Tensor out(kF32, {12, 32});
    const Memory input{x.view.data, 12 * 128}, output{out.view.data, 12 * 128};
    for (const int64_t start : {int64_t{25}, int64_t{-1}, INT64_MAX}) {
      const PlanText text{0, 12, start, a.views};
      const Status status = run.run({12, 0, &input, 1, &output, 1, &text, 1});
      EXPECT_FALSE(status.ok()) << start;
      EXPECT_EQ(std::string(status.message()).find("step 0, attention: "), 0u) << status.message();
    }
  }
}

// A step of one head over the caches of each text, and then over caches that the texts share.
TEST(PlanRun, TextsThatShareCaches) {
  Plan plan;
  plan.buffers = {buffer(BufferKind::input, {}, 0),      buffer(BufferKind::input, {}, 1),
                  buffer(BufferKind::cache, {}, 0),      buffer(BufferKind::cache, {}, 0),
                  buffer(BufferKind::cache, {}, 0),      buffer(BufferKind::cache, {}, 0),
                  floats(std::vector<float>(16, 0.5f)),  buffer(BufferKind::temporary, times(kRows, 64)),
                  buffer(BufferKind::output, {}, 0)};
  for (int64_t slot = 0; slot < 4; ++slot) plan.buffers[static_cast<size_t>(2 + slot)].slot = slot < 2 ? slot : slot + 1;
  const Operand x = operand(0, kF32, {{1}, {1}, kRows, {16}}), one = operand(6, kF32, {{1}, {1}, {1}, {16}});
  plan.steps = {{Opcode::attention, {x, x, x, no_operand(), operand(7, kF32, {{1}, kRows, {1}, {16}})}, {0, 0}, {0.25, 0.0}},
                {Opcode::fixed_attention,
                 {operand(7, kF32, {{1}, kRows, {1}, {16}}), one, one, operand(1, ElementType::i64, {{1}}),
                  operand(8, kF32, {{1}, {1}, kRows, {16}})},
                 {0, kFirstState, kFirstState + 1, 0}, {0.25}}};
  Random random(5);
  const auto cache = [&] {
    Tensor made(kF32, {1, 1, 32, 16});
    for (int64_t i = 0; i < 32 * 16; ++i) made.memory->as<float>()[i] = random.normal();
    return made;
  };
  const Tensor keys[] = {cache(), cache()}, values[] = {cache(), cache()}, heard[] = {cache(), cache()};
  const TensorView texts[][4] = {{keys[0].view, values[0].view, heard[0].view, heard[1].view},
                                 {keys[1].view, values[1].view, heard[0].view, heard[1].view},
                                 {keys[1].view, values[1].view, heard[1].view, heard[1].view}};
  const Tensor rows = random_tensor(kF32, {3, 16}, random);
  const Tensor start = index_tensor<int64_t>({20});
  PlanRun run(std::move(plan), 2);
  const auto call = [&](int64_t begin, int64_t end, const std::vector<PlanText>& given, std::vector<uint8_t>* bytes) {
    Tensor out(kF32, {end - begin, 16});
    const Memory inputs[] = {{rows.memory->data() + begin * 64, (end - begin) * 64}, {start.view.data, 8}};
    const Memory output{out.view.data, (end - begin) * 64};
    const Status status =
        run.run({end - begin, 0, inputs, 2, &output, 1, given.data(), static_cast<int64_t>(given.size())});
    *bytes = out.bytes();
    return status;
  };
  std::vector<uint8_t> first, second, both;
  ASSERT_TRUE(call(0, 2, {{0, 2, 7, texts[0]}}, &first).ok());
  ASSERT_TRUE(call(2, 3, {{0, 1, 4, texts[1]}}, &second).ok());
  const Status status = call(0, 3, {{0, 2, 7, texts[0]}, {2, 3, 4, texts[1]}}, &both);
  ASSERT_TRUE(status.ok()) << status.message();
  first.insert(first.end(), second.begin(), second.end());
  EXPECT_EQ(both, first);
  EXPECT_TRUE(refused(call(0, 3, {{0, 2, 7, texts[0]}, {2, 3, 4, texts[2]}}, &both),
                      "step 1, fixed_attention: it needs caches of layer 0 that all texts share"));
}

TEST(PlanRun, TwoCachesOfOneName) {
  Plan plan = plan_with_caches();
  plan.buffers[2].slot = kKeys;
  Plan copy = plan;
  PlanRun run(std::move(copy), 1);
  const PlanText text{0, 1, 0, nullptr};
  EXPECT_TRUE(refused(run.run({1, 0, nullptr, 0, nullptr, 0, &text, 1}), "two caches"));
}

TEST(PlanRun, MemoryThatDoesNotFit) {
  Bound run(small_plan(), 1, false);
  EXPECT_TRUE(refused(run.call(), "weight w has no memory"));
  EXPECT_TRUE(refused(run.run->bind(0, {run.weight.view.data, 192}), "buffer 0"));
  EXPECT_TRUE(refused(run.run->bind(-1, {run.weight.view.data, 192}), "buffer -1"));
  EXPECT_TRUE(refused(run.run->bind(100, {run.weight.view.data, 192}), "buffer 100"));
  EXPECT_TRUE(refused(run.run->bind(1, {run.weight.view.data, 188}), "188 bytes; expected 192"));
  EXPECT_TRUE(refused(run.run->bind(1, {nullptr, 192}), "192 bytes"));
  ASSERT_TRUE(run.run->bind(1, {run.weight.view.data, 192}).ok());
  EXPECT_TRUE(run.call().ok());

  std::vector<char> memory(4096);
  const Memory much{memory.data(), 4096}, little{memory.data(), 8};
  const PlanText text{0, 4, 0, nullptr};
  const auto call = [&](std::vector<Memory> inputs, std::vector<Memory> outputs) {
    return run.run->run({4, 2, inputs.data(), static_cast<int64_t>(inputs.size()), outputs.data(),
                         static_cast<int64_t>(outputs.size()), &text, 1});
  };
  EXPECT_TRUE(refused(call({}, {much}), "input 0 of a call is missing or too small; expected 128 bytes"));
  EXPECT_TRUE(refused(call({much}, {much}), "input 1 of a call"));
  EXPECT_TRUE(refused(call({{memory.data(), 127}, much}, {much}), "expected 128 bytes"));
  EXPECT_TRUE(refused(call({much, little}, {much}), "expected 16 bytes"));
  EXPECT_TRUE(refused(call({much, much}, {little}), "output 0 of a call is missing or too small; expected 48 bytes"));
  EXPECT_TRUE(refused(call({much, much}, {}), "output 0"));
}

TEST(PlanRun, RowsAndTextsThatDoNotFit) {
  Bound run(small_plan());
  std::vector<char> memory(1 << 16);
  const Memory much{memory.data(), 1 << 16};
  const Memory inputs[] = {much, {memory.data() + 1024, 1 << 15}}, outputs[] = {{memory.data() + 2048, 1 << 15}};
  const auto call = [&](int64_t rows, int64_t kept, std::vector<PlanText> texts) {
    return run.run->run({rows, kept, inputs, 2, outputs, 1, texts.data(), static_cast<int64_t>(texts.size())});
  };
  EXPECT_TRUE(refused(call(0, 0, {}), "0 rows"));
  EXPECT_TRUE(refused(call(-1, 0, {{0, -1, 0, nullptr}}), "-1 rows"));
  EXPECT_TRUE(refused(call(INT64_MAX, 0, {{0, INT64_MAX, 0, nullptr}}), "expected 1 to"));
  EXPECT_TRUE(refused(call(4, 5, {{0, 4, 0, nullptr}}), "5 are kept"));
  EXPECT_TRUE(refused(call(4, -1, {{0, 4, 0, nullptr}}), "-1 are kept"));
  EXPECT_TRUE(refused(call(4, 1, {}), "have 0 rows; expected 4"));
  EXPECT_TRUE(refused(call(4, 1, {{0, 3, 0, nullptr}}), "have 3 rows; expected 4"));
  EXPECT_TRUE(refused(call(4, 1, {{0, 5, 0, nullptr}}), "rows 0 to 5"));
  EXPECT_TRUE(refused(call(4, 1, {{1, 4, 0, nullptr}}), "rows 1 to 4"));
  EXPECT_TRUE(refused(call(4, 1, {{0, 3, 0, nullptr}, {2, 4, 0, nullptr}}), "text 1 has rows 2 to 4"));
  EXPECT_TRUE(refused(call(4, 1, {{0, 2, 0, nullptr}, {3, 4, 0, nullptr}}), "text 1 has rows 3 to 4"));
  EXPECT_TRUE(refused(call(4, 1, {{0, 0, 0, nullptr}, {0, 4, 0, nullptr}}), "text 0 has rows 0 to 0"));
  EXPECT_TRUE(refused(call(4, 1, {{0, 4, 0, nullptr}, {4, 4, 0, nullptr}}), "text 1 has rows 4 to 4"));
  std::vector<float> first, second;
  ASSERT_TRUE(run.call(4, 2, &first).ok());
  ASSERT_TRUE(run.call(4, 2, &second).ok());
  EXPECT_EQ(first, second) << "refused calls change nothing";
}

// Plans that a damaged file can describe. Each is refused when it runs.
TEST(PlanRun, PlansThatCannotRun) {
  const auto refuses = [](const std::function<void(Plan&)>& change, const char* says) {
    Bound run(plan_of(change));
    return refused(run.call(), says);
  };
  const auto step = [](size_t i, const std::function<void(PlanStep&)>& change) {
    return [=](Plan& plan) { change(plan.steps[i]); };
  };
  EXPECT_TRUE(refuses([](Plan& p) { std::swap(p.steps[0], p.steps[1]); }, "reads buffer 3 before it is written"));
  EXPECT_TRUE(refuses([](Plan& p) { p.steps.erase(p.steps.begin() + 2); }, "reads buffer 5 before it is written"));
  EXPECT_TRUE(refuses(step(1, [](PlanStep& s) { s.operands[0].buffer = 7; }), "reads buffer 7 before it is written"));
  EXPECT_TRUE(refuses(
      [](Plan& p) {
        const std::vector<Operand> operands = {operand(6, ElementType::i64, {kKept, {1}}), operand(3, kF32, {kKept, {6}})};
        p.steps.insert(p.steps.begin(), {Opcode::scatter, operands, {}, {1.0}});
      },
      "reads buffer 3 before it is written"));
  EXPECT_TRUE(refuses(step(0, [](PlanStep& s) { s.operands[0] = {}; }), "has no operand 0"));
  EXPECT_TRUE(refuses(step(0, [](PlanStep& s) { s.operands[3] = {}; }), "has no operand 3"));
  EXPECT_TRUE(refuses(step(0, [](PlanStep& s) { s.operands.pop_back(); }), "expected other numbers of them"));
  EXPECT_TRUE(refuses(step(2, [](PlanStep& s) { s.integers = {1}; }), "1 integers"));
  EXPECT_TRUE(refuses(step(2, [](PlanStep& s) { s.numbers = {1.0}; }), "1 numbers"));
  EXPECT_TRUE(refuses(step(1, [](PlanStep& s) { s.integers.pop_back(); }), "4 integers for instructions"));
  for (const int64_t buffer : {0, 1, 2, 6}) {  // inputs, weights and constants
    EXPECT_TRUE(refuses(step(2, [=](PlanStep& s) { s.operands[1].buffer = buffer; }), "is a buffer that it cannot use"));
  }
  EXPECT_TRUE(refuses([](Plan& p) { p.buffers[6].kind = BufferKind::cache; }, "is a buffer that it cannot use"));
  // Sizes, strides and offsets.
  EXPECT_TRUE(refuses(step(0, [](PlanStep& s) { s.operands[1].size[0].constant = 7; }), "beyond buffer 1 of 192 bytes"));
  EXPECT_TRUE(refuses(step(0, [](PlanStep& s) { s.operands[1].offset.constant = 1; }), "beyond buffer 1"));
  EXPECT_TRUE(refuses(step(0, [](PlanStep& s) { s.operands[1].offset.constant = -1; }), "beyond buffer 1"));
  EXPECT_TRUE(refuses(step(0, [](PlanStep& s) { s.operands[1].stride[0].constant = -8; }), "beyond buffer 1"));
  EXPECT_TRUE(refuses(step(0, [](PlanStep& s) { s.operands[1].stride[0].constant = int64_t{1} << 48; }), "beyond buffer 1"));
  EXPECT_TRUE(refuses(step(0, [](PlanStep& s) { s.operands[2].offset.constant = 1; }), "beyond buffer 2 of 24 bytes"));
  EXPECT_TRUE(refuses(step(2, [](PlanStep& s) { s.operands[1].size[0].constant = 1; }), "beyond buffer 5"));
  EXPECT_TRUE(refuses(step(2, [](PlanStep& s) { s.operands[1].size[0].per_row = -1; }), "beyond buffer 5"));
  EXPECT_TRUE(refuses(step(2, [](PlanStep& s) { s.operands[0].type = ElementType::i64; }), "beyond buffer 4"));
  EXPECT_TRUE(refuses(step(3, [](PlanStep& s) { s.operands[0].offset.per_row = 1; }), "beyond buffer 5"));
  EXPECT_TRUE(refuses([](Plan& p) { p.buffers[3].bytes = {15, 20, 0}; }, "beyond buffer 3 of 95 bytes"));
  EXPECT_TRUE(refuses([](Plan& p) { p.buffers[3].bytes = {-1, 0, 0}; }, "buffer 3 has no possible size"));
  EXPECT_TRUE(refuses([](Plan& p) { p.buffers[3].bytes = {0, int64_t{1} << 46, 0}; }, "buffer 3 has no possible size"));
  // Results whose elements share memory would depend on the order of threads.
  EXPECT_TRUE(refuses(step(2, [](PlanStep& s) { s.operands[1].stride[0] = {}; }), "shares memory with itself"));
  EXPECT_TRUE(refuses(step(2, [](PlanStep& s) { s.operands[1].stride[0].constant = 5; }), "shares memory with itself"));
  // What operators refuse has the step's name.
  EXPECT_TRUE(refuses(step(2, [](PlanStep& s) { s.operands[0].size[1].constant = 5; }),
                      "step 2, softmax: out has shape [4, 6]"));
  EXPECT_TRUE(refuses(step(1, [](PlanStep& s) { s.integers[0] = 99; }), "step 1, compute: instruction 0 has operator 99"));
}

// Sums of many sizes that do not overflow one by one.
TEST(PlanRun, TemporariesBeyondAllMemory) {
  Plan plan;
  constexpr int64_t kCount = (1 << 17) + 1;
  const Extent huge{int64_t{1} << 46, 0, 0};
  for (int64_t i = 0; i < kCount; ++i) plan.buffers.push_back(buffer(BufferKind::temporary, huge));
  const auto count_up = [](int64_t i) {
    return PlanStep{Opcode::count_up, {operand(i, ElementType::i64, {{1}})}, {}, {0.0, 1.0}};
  };
  for (int64_t i = 0; i < kCount; ++i) plan.steps.push_back(count_up(i));
  for (int64_t i = 0; i < kCount; ++i) plan.steps.push_back(count_up(i));
  PlanRun run(std::move(plan), 1);
  const PlanText text{0, 1, 0, nullptr};
  const Status status = run.run({1, 0, nullptr, 0, nullptr, 0, &text, 1});
  EXPECT_TRUE(refused(status, "no memory for the temporaries", Status::Kind::no_memory));
}

TEST(PlanRun, ThousandsOfRowsNeedNoOverflow) {
  Plan plan = small_plan();
  for (Extent* each : {&plan.steps[2].operands[1].size[0], &plan.steps[2].operands[1].stride[0]}) {
    *each = {int64_t{1} << 48, int64_t{1} << 48, int64_t{1} << 48};
  }
  Bound run(plan);
  std::vector<float> out;
  for (const int64_t rows : {1, 1000}) EXPECT_TRUE(refused(run.call(rows, rows, &out), "beyond buffer 5"));
  // Views of no elements at any place are of no memory.
  plan = small_plan();
  plan.steps[0].operands[0].offset = {int64_t{1} << 40, 0, 0};
  Bound far(plan);
  EXPECT_TRUE(refused(far.call(), "input 0 of a call is missing or too small"));
}

TEST(PlanRun, MeasuresOperators) {
  Bound run(small_plan());
  ASSERT_TRUE(run.call().ok());
  EXPECT_TRUE(run.run->measured().empty());
  run.run->measure();
  ASSERT_TRUE(run.call().ok());
  ASSERT_EQ(run.run->measured().size(), static_cast<size_t>(kOpcodes));
  EXPECT_GT(run.run->measured()[static_cast<size_t>(Opcode::softmax)], 0.0);
  EXPECT_EQ(run.run->measured()[static_cast<size_t>(Opcode::top)], 0.0);
  for (int i = 0; i < kOpcodes; ++i) EXPECT_NE(std::string(name_of(static_cast<Opcode>(i))), "");
}

}  // namespace
}  // namespace lowbit::test

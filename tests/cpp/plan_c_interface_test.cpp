// plan/lowbit.h: texts of small models, in memory and in files, and every kind of misuse.

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <numeric>

#include "../../plan/lowbit.h"
#include "support/plan_writer.h"

#ifdef __linux__
#include <sys/resource.h>

#include <csignal>
#endif

namespace lowbit::test {
namespace {

constexpr int64_t kTokens = 11, kWidth = 32;

// Logits of one layer of attention, whose queries, keys and values are the tokens' embeddings; of a model with states, its
// results go through a convolution.
Plan language_model(bool recurrent) {
  constexpr ElementType f32 = ElementType::f32;
  std::vector<float> table(kTokens * kWidth), head(kTokens * kWidth);
  for (size_t i = 0; i < table.size(); ++i) {
    table[i] = static_cast<float>(static_cast<int>(i * i * 7 + i * 3) % 23 - 11) / 8.0f;
    head[i] = static_cast<float>(static_cast<int>(i * i * 5 + i) % 19 - 9) / 8.0f;
  }
  const auto row = [&](int64_t at) { return operand(at, f32, {{1}, kRows, {kWidth}}); };
  const auto heads = [&](int64_t at) { return operand(at, f32, {{1}, {1}, kRows, {kWidth}}); };
  enum : int64_t { tokens, positions, last, logits, keys, values, state, embedding, output, taps, x, y, z, all };
  Plan plan;
  plan.about = {{"vocabulary", {kTokens}}, {"positions", {100}}, {"stop", {3, 5}}};
  const Buffer rows = buffer(BufferKind::temporary, times(kRows, 4 * kWidth));
  plan.buffers = {buffer(BufferKind::input, {}, 0),  buffer(BufferKind::input, {}, 1), buffer(BufferKind::input, {}, 2),
                  buffer(BufferKind::output, {}, 0), buffer(BufferKind::cache, {}, 0), buffer(BufferKind::cache, {}, 0),
                  buffer(BufferKind::cache, {}, 0),  floats(table),                    floats(head),
                  floats(std::vector<float>(3 * kWidth, 0.5f)), rows, rows, rows,
                  buffer(BufferKind::temporary, times(kRows, 4 * kTokens))};
  plan.buffers[keys].slot = kKeys;
  plan.buffers[values].slot = kValues;
  plan.buffers[keys].shape = plan.buffers[values].shape = {1, kWidth};
  plan.buffers[state].slot = kFirstState;
  plan.buffers[state].shape = {1, 2, kWidth};
  plan.steps = {
      {Opcode::take, {operand(embedding, f32, {{kTokens}, {kWidth}}), operand(tokens, ElementType::i64, {kRows}),
                      operand(x, f32, {kRows, {kWidth}})}, {}, {}},
      {Opcode::attention, {heads(x), heads(x), heads(x), no_operand(), operand(y, f32, {{1}, kRows, {1}, {kWidth}})}, {0, 0},
       {0.25, 0.0}}};
  if (recurrent) {
    plan.steps.push_back({Opcode::short_conv, {row(y), operand(taps, f32, {{3}, {kWidth}}), no_operand(), row(z)},
                          {0, kFirstState, 0}, {}});
  } else {
    plan.buffers[state] = plan.buffers[positions];  // an input more, which nothing reads
  }
  plan.steps.push_back({Opcode::float_linear, {operand(recurrent ? z : y, f32, {kRows, {kWidth}}),
                                               operand(output, f32, {{kTokens}, {kWidth}}), no_operand(),
                                               operand(all, f32, {kRows, {kTokens}})}, {}, {}});
  plan.steps.push_back({Opcode::take, {operand(all, f32, {kRows, {kTokens}}), operand(last, ElementType::i64, {kKept}),
                                       operand(logits, f32, {kKept, {kTokens}})}, {}, {}});
  return plan;
}

class CInterface : public testing::Test {
 protected:
  CInterface() {
    std::filesystem::create_directories(directory_);
    write("lowbit.plan", bytes_of(language_model(false)));
    write("recurrent.plan", bytes_of(language_model(true)));
  }
  ~CInterface() override {
    lowbit_close(model_);
    std::filesystem::remove_all(directory_);
  }

  void write(const char* name, const std::string& bytes) {
    std::ofstream(directory_ / name, std::ios::binary) << bytes;
  }
  std::string read(const char* name) {
    std::ifstream file(directory_ / name, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  std::string path(const char* name) { return (directory_ / name).string(); }
  size_t files() {
    const std::filesystem::directory_iterator all(directory_);
    return static_cast<size_t>(std::distance(begin(all), end(all)));
  }

  lowbit_model* open(const char* name = "", const lowbit_open_options* options = nullptr) {
    EXPECT_EQ(lowbit_open(path(name).c_str(), options, &model_, &error_), LOWBIT_OK) << error_.message;
    return model_;
  }
  lowbit_text* text(int64_t length = 40, lowbit_cache cache = LOWBIT_TEXT_F32) {
    const lowbit_text_options options{sizeof options, length, cache, cache};
    lowbit_text* made = nullptr;
    EXPECT_EQ(lowbit_text_new(model_, &options, &made, &error_), LOWBIT_OK) << error_.message;
    return made;
  }
  std::vector<float> feed(lowbit_text* text, const std::vector<int64_t>& tokens) {
    std::vector<float> logits(kTokens);
    EXPECT_EQ(lowbit_feed(model_, text, tokens.data(), static_cast<int64_t>(tokens.size()), logits.data(), &error_), LOWBIT_OK)
        << error_.message;
    return logits;
  }
  void refused(lowbit_result expected, const char* says, lowbit_result result) {
    EXPECT_EQ(result, expected) << error_.message;
    EXPECT_NE(std::strstr(error_.message, says), nullptr) << error_.message << "; expected " << says;
  }

  const std::filesystem::path directory_ =
      std::filesystem::path(testing::TempDir()) /
      (std::string("lowbit ") + testing::UnitTest::GetInstance()->current_test_info()->name());
  lowbit_model* model_ = nullptr;
  lowbit_error error_{};
};

const std::vector<int64_t> kPrompt = {1, 7, 4, 10, 0, 2, 9};

TEST_F(CInterface, OpensADirectoryAndFeedsPieces) {
  open();
  EXPECT_EQ(lowbit_vocabulary(model_), kTokens);
  EXPECT_EQ(lowbit_positions(model_), 100);
  int64_t stop[3] = {};
  EXPECT_EQ(lowbit_stop_tokens(model_, stop, 1), 2u);
  EXPECT_EQ(std::vector<int64_t>(stop, stop + 3), (std::vector<int64_t>{3, 0, 0}));
  lowbit_text *one = text(), *other = text();
  const std::vector<float> whole = feed(one, kPrompt);
  std::vector<float> last;
  for (const int64_t token : kPrompt) last = feed(other, {token});
  EXPECT_EQ(whole, last);
  EXPECT_EQ(lowbit_text_cut(one, 3, &error_), LOWBIT_OK);
  EXPECT_EQ(feed(one, {10, 0, 2, 9}), whole);
  int64_t tokens[16] = {};
  EXPECT_EQ(lowbit_text_tokens(one, tokens, 16), kPrompt.size());
  EXPECT_EQ(std::vector<int64_t>(tokens, tokens + kPrompt.size()), kPrompt);
  EXPECT_EQ(lowbit_text_recurrent(one), 0);
  EXPECT_EQ(lowbit_text_position(one), 7);
  EXPECT_EQ(lowbit_text_length(one), 40);
  lowbit_text_free(one);
  lowbit_text_free(other);
}

TEST_F(CInterface, SavedTexts) {
  for (const char* name : {"lowbit.plan", "recurrent.plan"}) {
    for (const lowbit_cache cache : {LOWBIT_TEXT_F32, LOWBIT_TEXT_F16, LOWBIT_TEXT_I8, LOWBIT_TEXT_I4}) {
      lowbit_close(model_);
      open(name);
      lowbit_text* one = text(40, cache);
      feed(one, kPrompt);
      EXPECT_EQ(lowbit_text_save(one, path("prefix").c_str(), &error_), LOWBIT_OK) << error_.message;
      const std::vector<float> expected = feed(one, {8, 8, 1});
      lowbit_text* other = text(100, cache);  // of another length
      feed(other, {5, 5});
      EXPECT_EQ(lowbit_text_load(other, path("prefix").c_str(), &error_), LOWBIT_OK) << error_.message;
      EXPECT_EQ(lowbit_text_position(other), 7);
      EXPECT_EQ(feed(other, {8, 8, 1}), expected) << name << cache;
      EXPECT_EQ(lowbit_text_recurrent(other), name[0] == 'r');
    }
  }
  EXPECT_EQ(files(), 3u) << "no temporary files are left";
  refused(LOWBIT_INVALID, "of a model with states is cut to 3 tokens; expected 0", [&] {
    lowbit_text* one = text();
    feed(one, kPrompt);
    return lowbit_text_cut(one, 3, &error_);
  }());
}

TEST_F(CInterface, FilesThatAreNoSavedTexts) {
  open();
  lowbit_text* one = text();
  feed(one, kPrompt);
  const std::string file = path("prefix");
  ASSERT_EQ(lowbit_text_save(one, file.c_str(), &error_), LOWBIT_OK);
  const std::string whole = read("prefix");
  const std::vector<float> expected = feed(one, {4});
  for (size_t size = 0; size < whole.size(); size += 61) {
    write("prefix", whole.substr(0, size));
    ASSERT_EQ(lowbit_text_load(one, file.c_str(), &error_), LOWBIT_INVALID) << size;
  }
  for (size_t at = 0; at < whole.size(); at += at < 64 ? 1 : 97) {
    std::string changed = whole;
    changed[at] = static_cast<char>(changed[at] ^ 0x41);
    write("prefix", changed);
    ASSERT_NE(lowbit_text_load(one, file.c_str(), &error_), LOWBIT_OK) << at;
    ASSERT_STRNE(error_.message, "");
  }
  write("prefix", whole + "x");
  refused(LOWBIT_INVALID, "has more bytes than its text", lowbit_text_load(one, file.c_str(), &error_));
  // Right checksums do not make other content right: a token that is not in the vocabulary, in the file's first byte of tokens.
  std::string changed = whole.substr(0, whole.size() - 4);
  changed[56] = static_cast<char>(kTokens);
  write("prefix", with_checksum(changed));
  refused(LOWBIT_INVALID, "has tokens outside of the vocabulary", lowbit_text_load(one, file.c_str(), &error_));
  refused(LOWBIT_SYSTEM, "does not open", lowbit_text_load(one, path("none").c_str(), &error_));
  write("prefix", whole);
  refused(LOWBIT_OUT_OF_RANGE, "has a text of 7 tokens; expected at most 5",
          lowbit_text_load(text(5), file.c_str(), &error_));
  refused(LOWBIT_INVALID, "has caches of types 0 and 0; expected those of the text, 3 and 3",
          lowbit_text_load(text(40, LOWBIT_TEXT_I8), file.c_str(), &error_));
  ASSERT_EQ(lowbit_text_cut(one, 7, &error_), LOWBIT_OK) << "all of this left the text as it was";
  EXPECT_EQ(feed(one, {4}), expected);
  open("recurrent.plan");
  refused(LOWBIT_INVALID, "has a text of another model", lowbit_text_load(text(), file.c_str(), &error_));
}

TEST_F(CInterface, FilesThatCannotBeWritten) {
  open();
  lowbit_text* one = text();
  feed(one, kPrompt);
  refused(LOWBIT_SYSTEM, "cannot be written", lowbit_text_save(one, path("none/prefix").c_str(), &error_));
#ifdef __linux__
  ASSERT_EQ(lowbit_text_save(one, path("prefix").c_str(), &error_), LOWBIT_OK);
  const std::string before = read("prefix");
  feed(one, kPrompt);
  // As on a full disk, a write fails in the middle of the file.
  std::signal(SIGXFSZ, SIG_IGN);
  rlimit limit{};
  getrlimit(RLIMIT_FSIZE, &limit);
  const rlimit small{512, limit.rlim_max};
  setrlimit(RLIMIT_FSIZE, &small);
  const lowbit_result result = lowbit_text_save(one, path("prefix").c_str(), &error_);
  setrlimit(RLIMIT_FSIZE, &limit);
  refused(LOWBIT_SYSTEM, "prefix cannot be written: File too large", result);
  EXPECT_EQ(read("prefix"), before) << "the earlier file stays";
  EXPECT_EQ(files(), 3u) << "no temporary files are left";
#endif
}

TEST_F(CInterface, Misuse) {
  float logits[kTokens];
  const int64_t token = 1;
  uint64_t number = 0;
  EXPECT_EQ(lowbit_api_version(), 2);
  refused(LOWBIT_INVALID, "path is NULL", lowbit_open(nullptr, nullptr, &model_, &error_));
  refused(LOWBIT_INVALID, "model is NULL", lowbit_open(path("").c_str(), nullptr, nullptr, &error_));
  refused(LOWBIT_SYSTEM, "does not open", lowbit_open(path("none").c_str(), nullptr, &model_, &error_));
  write("empty", "");
  EXPECT_NE(lowbit_open(path("empty").c_str(), nullptr, &model_, nullptr), LOWBIT_OK);
  EXPECT_EQ(model_, nullptr);
  lowbit_open_options options{};
  options.size = 3;
  refused(LOWBIT_INVALID, "size of options is 3", lowbit_open(path("").c_str(), &options, &model_, &error_));
  options = {sizeof options, -1, nullptr, nullptr};
  refused(LOWBIT_INVALID, "there are -1 threads", lowbit_open(path("").c_str(), &options, &model_, &error_));
  options = {sizeof(size_t), 99, nullptr, nullptr};  // a caller whose struct has no more
  open("", &options);
  lowbit_text* one = text();
  // Calls all functions that need a model with NULL and with a closed model. A text keeps the model that it began with.
  lowbit_model* const closed = model_;
  lowbit_close(closed);
  lowbit_close(closed);
  open();
  EXPECT_NE(closed, model_);
  for (lowbit_model* const wrong : {static_cast<lowbit_model*>(nullptr), closed}) {
    const char* const says = wrong == nullptr ? "model is NULL" : "model is not open";
    lowbit_text* made = one;
    EXPECT_EQ(lowbit_vocabulary(wrong), 0);
    EXPECT_EQ(lowbit_positions(wrong), 0);
    EXPECT_EQ(lowbit_stop_tokens(wrong, nullptr, 0), 0u);
    refused(LOWBIT_INVALID, says, lowbit_text_new(wrong, nullptr, &made, &error_));
    refused(LOWBIT_INVALID, says, lowbit_feed(wrong, one, &token, 1, logits, &error_));
    refused(LOWBIT_INVALID, says, lowbit_certify(wrong, &number, &error_));
  }
  refused(LOWBIT_INVALID, "belongs to another model", lowbit_feed(model_, one, &token, 1, logits, &error_));
  lowbit_text_free(one);
  lowbit_text_free(one);
  lowbit_text_free(nullptr);
  lowbit_close(nullptr);
  for (lowbit_text* const wrong : {static_cast<lowbit_text*>(nullptr), one}) {
    const char* const says = wrong == nullptr ? "text is NULL" : "text is not open";
    EXPECT_EQ(lowbit_text_length(wrong) + lowbit_text_position(wrong) + lowbit_text_recurrent(wrong), 0);
    EXPECT_EQ(lowbit_text_tokens(wrong, nullptr, 0), 0u);
    refused(LOWBIT_INVALID, says, lowbit_feed(model_, wrong, &token, 1, logits, &error_));
    refused(LOWBIT_INVALID, says, lowbit_text_cut(wrong, 0, &error_));
    refused(LOWBIT_INVALID, says, lowbit_text_save(wrong, path("x").c_str(), &error_));
    refused(LOWBIT_INVALID, says, lowbit_text_load(wrong, path("x").c_str(), &error_));
  }
  one = text();
  refused(LOWBIT_INVALID, "text is NULL", lowbit_text_new(model_, nullptr, nullptr, &error_));
  refused(LOWBIT_INVALID, "tokens is NULL", lowbit_feed(model_, one, nullptr, 1, logits, &error_));
  refused(LOWBIT_INVALID, "logits is NULL", lowbit_feed(model_, one, &token, 1, nullptr, &error_));
  refused(LOWBIT_INVALID, "file is NULL", lowbit_text_save(one, nullptr, &error_));
  refused(LOWBIT_INVALID, "file is NULL", lowbit_text_load(one, nullptr, &error_));
  refused(LOWBIT_INVALID, "certificate is NULL", lowbit_certify(model_, nullptr, &error_));
  refused(LOWBIT_OUT_OF_RANGE, "at most 40 altogether", lowbit_feed(model_, one, &token, 41, logits, &error_));
  refused(LOWBIT_OUT_OF_RANGE, "gets -1", lowbit_feed(model_, one, &token, -1, logits, &error_));
  refused(LOWBIT_INVALID, "there is no token 11; expected 0 to 10", lowbit_feed(model_, one, &kTokens, 1, logits, &error_));
  refused(LOWBIT_INVALID, "is cut to 3", lowbit_text_cut(one, 3, &error_));
  refused(LOWBIT_INVALID, "is cut to -1", lowbit_text_cut(one, -1, &error_));
  for (const auto& [text_options, says] : std::initializer_list<std::pair<lowbit_text_options, const char*>>{
           {{0, 16, LOWBIT_TEXT_F32, LOWBIT_TEXT_F32}, "size of options is 0"},
           {{sizeof(lowbit_text_options), 101, LOWBIT_TEXT_F32, LOWBIT_TEXT_F32}, "room for 101 tokens; expected 1 to 100"},
           {{sizeof(lowbit_text_options), 16, LOWBIT_TEXT_F32, static_cast<lowbit_cache>(7)}, "a cache is 7"},
           {{sizeof(lowbit_text_options), 16, LOWBIT_TEXT_F32, LOWBIT_TEXT_I8}, "cache types 0 and 3; expected the same"}}) {
    lowbit_text* made = one;
    refused(LOWBIT_INVALID, says, lowbit_text_new(model_, &text_options, &made, &error_));
    EXPECT_EQ(made, nullptr);
  }
}

TEST_F(CInterface, TheCertificateIsTheSameOnEveryMachine) {
  uint64_t certificate = 0;
  EXPECT_EQ(lowbit_certify(open(), &certificate, &error_), LOWBIT_OK) << error_.message;
  EXPECT_EQ(certificate, UINT64_C(0x03888cd08e3a2c99)) << std::hex << certificate;
}

std::vector<int64_t> draws(const std::vector<float>& logits, const lowbit_sampling& options, int count = 2000) {
  std::vector<int64_t> counts(logits.size());
  lowbit_random random;
  lowbit_seed(&random, 1);
  for (int i = 0; i < count; ++i) {
    int64_t token = -1;
    EXPECT_EQ(lowbit_sample(logits.data(), static_cast<int64_t>(logits.size()), &options, &random, &token, nullptr), LOWBIT_OK);
    ++counts.at(static_cast<size_t>(token));
  }
  return counts;
}

TEST(Sampling, TokensThatMayBeDrawn) {
  constexpr size_t size = sizeof(lowbit_sampling);
  // Probabilities .5, .25, .125 and .125 at temperature 1.
  const std::vector<float> logits = {0, std::log(4.0f), -INFINITY, std::log(2.0f), 0};
  const auto which = [&](const lowbit_sampling& options) {
    std::vector<int64_t> drawn;
    const std::vector<int64_t> counts = draws(logits, options);
    for (size_t i = 0; i < counts.size(); ++i) {
      if (counts[i] > 0) drawn.push_back(static_cast<int64_t>(i));
    }
    return drawn;
  };
  using Tokens = std::vector<int64_t>;
  EXPECT_EQ(which({size, 0, 0, 0, 0}), (Tokens{1}));
  EXPECT_EQ(which({size, 1, 0, 0, 0}), (Tokens{0, 1, 3, 4}));
  EXPECT_EQ(which({size, 1, 1, 0, 0}), (Tokens{1}));
  EXPECT_EQ(which({size, 1, 2, 0, 0}), (Tokens{1, 3}));
  EXPECT_EQ(which({size, 1, 3, 0, 0}), (Tokens{0, 1, 3, 4})) << "two are equally likely";
  EXPECT_EQ(which({size, 1, 0, 0.4, 0}), (Tokens{1}));
  EXPECT_EQ(which({size, 1, 0, 0.7, 0}), (Tokens{1, 3}));
  EXPECT_EQ(which({size, 1, 0, 0.8, 0}), (Tokens{0, 1, 3})) << "the first of equally likely ones";
  EXPECT_EQ(which({size, 1, 0, 0, 0.4}), (Tokens{1, 3}));
  EXPECT_EQ(which({size, 1e300, 0, 0.1, 1}), (Tokens{0})) << "all are equally likely, and top_p keeps the first";
  EXPECT_EQ(which({size, 1e-300, 0, 0, 0}), (Tokens{1}));
  EXPECT_EQ(which({size, 1e300, 0, 0, 0}), (Tokens{0, 1, 3, 4}));
  const std::vector<int64_t> counts = draws(logits, {size, 1, 0, 0, 0}, 16000);
  const double expected[] = {2000, 8000, 0, 4000, 2000};
  for (size_t i = 0; i < 5; ++i) EXPECT_NEAR(static_cast<double>(counts[i]), expected[i], 300) << i;
}

TEST(Sampling, TheSameTokensOnEveryMachine) {
  std::vector<float> logits(97);
  for (size_t i = 0; i < logits.size(); ++i) logits[i] = static_cast<float>(i * i % 31) / 7.0f;
  const lowbit_sampling options{sizeof options, 0.8, 40, 0.9, 0.01};
  lowbit_random random;
  lowbit_seed(&random, 42);
  std::vector<int64_t> tokens(8);
  for (int64_t& token : tokens) {
    ASSERT_EQ(lowbit_sample(logits.data(), 97, &options, &random, &token, nullptr), LOWBIT_OK);
  }
  EXPECT_EQ(tokens, (std::vector<int64_t>{73, 42, 81, 67, 11, 88, 73, 73})) << "those of lowbit.llm.sample with this seed";
}

TEST(Sampling, Misuse) {
  lowbit_error error{};
  const std::vector<float> logits = {1, 2};
  lowbit_random random{};
  int64_t token = 0;
  const auto refused = [&](const char* says, const std::vector<float>& values, const lowbit_sampling& options) {
    EXPECT_EQ(lowbit_sample(values.data(), static_cast<int64_t>(values.size()), &options, &random, &token, &error),
              LOWBIT_INVALID);
    EXPECT_NE(std::strstr(error.message, says), nullptr) << error.message;
  };
  constexpr size_t size = sizeof(lowbit_sampling);
  refused("random has no seed", logits, {size, 1, 0, 0, 0});
  lowbit_seed(&random, 0);
  lowbit_seed(nullptr, 0);
  refused("temperature is -1", logits, {size, -1, 0, 0, 0});
  refused("temperature is nan", logits, {size, NAN, 0, 0, 0});
  refused("temperature is inf", logits, {size, INFINITY, 0, 0, 0});
  refused("top_k is -1", logits, {size, 1, -1, 0, 0});
  refused("top_p is 2", logits, {size, 1, 0, 2, 0});
  refused("min_p is -1", logits, {size, 1, 0, 0, -1});
  refused("size of options is 1", logits, {1, 0, 0, 0, 0});
  refused("2 logits have no largest one that is finite", {1, NAN}, {size, 0, 0, 0, 0});
  refused("no largest one that is finite", {INFINITY, 0}, {size, 1, 0, 0, 0});
  EXPECT_EQ(lowbit_sample(logits.data(), 0, nullptr, &random, &token, &error), LOWBIT_INVALID);
  EXPECT_EQ(lowbit_sample(nullptr, 2, nullptr, &random, &token, &error), LOWBIT_INVALID);
  EXPECT_EQ(lowbit_sample(logits.data(), 2, nullptr, nullptr, &token, &error), LOWBIT_INVALID);
  EXPECT_EQ(lowbit_sample(logits.data(), 2, nullptr, &random, nullptr, nullptr), LOWBIT_INVALID);
  EXPECT_EQ(lowbit_most_likely(nullptr, 2), -1);
}

}  // namespace
}  // namespace lowbit::test

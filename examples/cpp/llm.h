// Shared by the runners of language models: command line, sampling, and the loop over tokens.
#pragma once

#include <lowbit/runner/tokenizer.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

struct LlmOptions {
  std::string model;
  std::vector<int64_t> ids;
  std::unique_ptr<lowbit::Tokenizer> tokenizer;  // null: tokens in, tokens out
  int64_t max_new_tokens = 128;
  double temperature = 0, top_p = 1;
  int64_t seed = 0;
  int64_t threads = 0;  // 0: the runtime's default
  int64_t max_length = 0;  // of a text, in tokens; 0: that of the file
  std::string cache;       // the type of keys and values; empty: that of the file
  std::string load, save;  // files of texts
  bool stats = false;
  bool certify = false;  // of a plan
};

// A decoder with its KV caches.
struct LanguageModel {
  int64_t loaded = 0;         // tokens of the text that was loaded
  int64_t max_length = 0;     // of a text, in tokens
  int64_t chunk = 0;          // most tokens in one step
  int64_t vocabulary = 0;
  std::vector<int64_t> stop;  // tokens that end a text
  // Appends `count` tokens to the `start` tokens so far, and writes the logits after the last of them.
  std::function<void(int64_t* tokens, int64_t count, int64_t start, std::vector<float>& logits)> step;
};

inline void check(const lowbit::Status& status) {
  if (!status.ok()) throw std::runtime_error(status.message());
}

// Parses "1,2,3"; throws std::runtime_error, in which the text is called `name`.
inline std::vector<int64_t> parse_ids(const std::string& name, std::string_view text) {
  std::vector<int64_t> ids;
  const char* at = text.data();
  const char* const end = at + text.size();
  while (at != end) {
    int64_t id = 0;
    const auto [behind, error] = std::from_chars(at, end, id);
    if (error != std::errc() || (behind != end && (*behind != ',' || behind + 1 == end))) {
      throw std::runtime_error(name + " is '" + std::string(text) + "'; expected numbers separated by commas");
    }
    ids.push_back(id);
    at = behind == end ? end : behind + 1;
  }
  return ids;
}

template <class Number>
Number parse_number(const std::string& name, const std::string& text, Number least, Number most) {
  Number value = 0;
  const auto [behind, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || behind != text.data() + text.size() || !(value >= least && value <= most)) {
    std::ostringstream message;
    message << name << " is '" << text << "'; expected a number from " << least << " to " << most;
    throw std::runtime_error(message.str());
  }
  return value;
}

inline LlmOptions parse_llm_options(int argc, char** argv, const char* model_kind) {
  const bool has_texts = std::string(model_kind) != ".pt2";
  const std::string usage =
      std::string("usage: ") + argv[0] + " (--ids 1,2,3 | --tokens FILE --prompt TEXT) [options] MODEL" + model_kind +
      "\n  --ids LIST           the prompt's tokens; prints tokens\n"
      "  --tokens FILE        lowbit.tokens or its directory: text in, text out\n"
      "  --prompt TEXT        the prompt\n"
      "  --chat               the prompt is a message: apply the chat template\n"
      "  --max-new-tokens N   limit (default: 128); a full text or a stop token ends it earlier\n"
      "  --temperature T      samples with this temperature (default: 0, the most likely token)\n"
      "  --top-p P            samples only from the most likely tokens that together reach P (default: 1)\n"
      "  --seed S             seed of sampling (default: 0)\n"
      "  --threads N          (default: all)\n"
      "  --stats              prints tokens per second to stderr" +
      (has_texts ? "\n  --max-length N       the longest text in tokens (default: that of the file)\n"
                   "  --cache TYPE         float32, bfloat16, float16, int8, int4 or int8,int4\n"
                   "  --load FILE          continues a text that --save wrote\n"
                   "  --save FILE          writes the text and its caches at the end" : "") +
      (std::string(model_kind) == ".plan" ? "\n  --certify            prints only a plan's certificate; needs no --ids" : "");
  LlmOptions options;
  std::string tokens, prompt;
  bool has_prompt = false, chat = false;
  constexpr int64_t kMost = int64_t{1} << 31;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    const auto value = [&] {
      if (++i == argc) throw std::runtime_error(name + " needs a value\n" + usage);
      return std::string(argv[i]);
    };
    if (name == "--help") {
      std::puts(usage.c_str());
      std::exit(0);
    } else if (name == "--ids") {
      options.ids = parse_ids(name, value());
    } else if (name == "--tokens") {
      tokens = value();
    } else if (name == "--prompt") {
      prompt = value();
      has_prompt = true;
    } else if (name == "--chat") {
      chat = true;
    } else if (name == "--max-new-tokens") {
      options.max_new_tokens = parse_number<int64_t>(name, value(), 1, kMost);
    } else if (name == "--temperature") {
      options.temperature = parse_number<double>(name, value(), 0, 1000);
    } else if (name == "--top-p") {
      options.top_p = parse_number<double>(name, value(), 0, 1);
    } else if (name == "--seed") {
      options.seed = parse_number<int64_t>(name, value(), 0, kMost);
    } else if (name == "--threads") {
      options.threads = parse_number<int64_t>(name, value(), 1, 1024);
    } else if (has_texts && name == "--max-length") {
      options.max_length = parse_number<int64_t>(name, value(), 1, kMost);
    } else if (has_texts && name == "--cache") {
      options.cache = value();
    } else if (has_texts && name == "--load") {
      options.load = value();
    } else if (has_texts && name == "--save") {
      options.save = value();
    } else if (name == "--stats") {
      options.stats = true;
    } else if (name == "--certify" && std::string(model_kind) == ".plan") {
      options.certify = true;
    } else if (name.rfind("--", 0) == 0) {
      throw std::runtime_error("unknown option " + name + " here\n" + usage);
    } else if (options.model.empty()) {
      options.model = name;
    } else {
      throw std::runtime_error("more than one model was given: " + options.model + " and " + name);
    }
  }
  if (options.model.empty()) throw std::runtime_error("no model was given\n" + usage);
  if (has_prompt == tokens.empty() || (has_prompt && !options.ids.empty()) || (chat && !has_prompt)) {
    throw std::runtime_error("expected --ids alone, or --tokens and --prompt, with or without --chat\n" + usage);
  }
  if (has_prompt) {
    check(lowbit::Tokenizer::open(tokens, &options.tokenizer));
    check(chat ? options.tokenizer->chat({false, "", {prompt}}, &options.ids)
               : options.tokenizer->encode(prompt, true, &options.ids));
    if (options.ids.empty()) throw std::runtime_error("the prompt has no tokens; expected at least one");
  }
  if (options.ids.empty() && !options.certify) throw std::runtime_error("no prompt was given: --ids 1,2,3\n" + usage);
  return options;
}

// Samples a token; at temperature 0 the most likely one. Changes the logits, which must not be empty.
inline int64_t sample(std::vector<float>& logits, const LlmOptions& options, std::mt19937_64& random) {
  const int64_t best = std::max_element(logits.begin(), logits.end()) - logits.begin();
  const float most = logits[best];
  // std::max may hide a NaN.
  const bool has_nan = std::any_of(logits.begin(), logits.end(), [](float logit) { return std::isnan(logit); });
  if (has_nan || !std::isfinite(most)) throw std::runtime_error("the model's logits are not finite");
  if (options.temperature == 0) return best;
  double sum = 0;
  for (float& logit : logits) sum += logit = static_cast<float>(std::exp((logit - most) / options.temperature));
  std::vector<int64_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  if (options.top_p < 1) {
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return logits[a] > logits[b]; });
    double reached = 0;
    size_t count = 0;
    while (count < order.size() && (count == 0 || reached < options.top_p * sum)) reached += logits[order[count++]];
    order.resize(count);
    sum = reached;
  }
  double left = std::generate_canonical<double, 53>(random) * sum;
  for (const int64_t token : order) {
    left -= logits[token];
    if (left < 0) return token;
  }
  return best;  // only reached if the sum was rounded down
}

// Prints each new token as soon as it is known, or the text that it completes.
inline void generate(const LanguageModel& model, const LlmOptions& options) {
  using Clock = std::chrono::steady_clock;
  const auto prompt = model.loaded + static_cast<int64_t>(options.ids.size());
  if (prompt >= model.max_length) {
    throw std::runtime_error("the prompt has " + std::to_string(prompt) + " tokens; expected fewer than the model's " +
                             std::to_string(model.max_length));
  }
  for (const int64_t id : options.ids) {
    if (id < 0 || id >= model.vocabulary) {
      throw std::runtime_error("the prompt has token " + std::to_string(id) + "; expected 0 to " +
                               std::to_string(model.vocabulary - 1));
    }
  }
  std::mt19937_64 random(static_cast<uint64_t>(options.seed));
  std::vector<float> logits;
  std::vector<int64_t> tokens = options.ids;
  std::unique_ptr<lowbit::TokenStream> stream;
  if (options.tokenizer) stream = std::make_unique<lowbit::TokenStream>(*options.tokenizer, tokens);
  int64_t start = model.loaded, made = 0;
  const int64_t most = std::min(options.max_new_tokens, model.max_length - prompt);
  const auto begin = Clock::now();
  auto first = begin, last = begin;
  while (made < most) {
    for (size_t done = 0; done < tokens.size();) {
      const int64_t count = std::min<int64_t>(model.chunk, static_cast<int64_t>(tokens.size() - done));
      model.step(tokens.data() + done, count, start, logits);
      start += count;
      done += static_cast<size_t>(count);
    }
    if (static_cast<int64_t>(logits.size()) != model.vocabulary) {
      throw std::runtime_error("the model made " + std::to_string(logits.size()) + " logits; expected " +
                               std::to_string(model.vocabulary));
    }
    const int64_t token = sample(logits, options, random);
    last = Clock::now();
    if (start == prompt) first = last;
    if (std::find(model.stop.begin(), model.stop.end(), token) != model.stop.end()) break;
    if (stream) {
      std::string text;
      check(stream->push(token, &text));
      std::fwrite(text.data(), 1, text.size(), stdout);
    } else {
      std::printf(made ? " %lld" : "%lld", static_cast<long long>(token));
    }
    ++made;
    std::fflush(stdout);
    tokens.assign(1, token);
  }
  std::puts("");
  if (!options.stats) return;
  const auto seconds = [](auto from, auto to) { return std::chrono::duration<double>(to - from).count(); };
  const int64_t steps = start - prompt;
  std::fprintf(stderr, "prompt: %lld tokens in %.3f s, %.1f tokens/s\n", static_cast<long long>(prompt - model.loaded),
               seconds(begin, first), static_cast<double>(prompt - model.loaded) / seconds(begin, first));
  if (steps > 0) {
    std::fprintf(stderr, "then: %lld tokens in %.3f s, %.1f tokens/s\n", static_cast<long long>(steps),
                 seconds(first, last), static_cast<double>(steps) / seconds(first, last));
  }
}

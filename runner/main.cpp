// lowbit-run: texts of a language model on a machine without Python.

#include <algorithm>
#include <charconv>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <exception>
#include <iterator>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#ifdef _WIN32
#include <io.h>
#define isatty _isatty
#define fileno _fileno
#else
#include <unistd.h>
#endif

#include "../plan/model.h"
#include "../plan/plan.h"
#include "../plan/sampling.h"
#include "tokenizer.h"

namespace {

using namespace lowbit;

constexpr char kUsage[] =
    "usage: lowbit-run DIRECTORY [options]\n"
    "Continues a text. Without -p it holds a conversation: each line of the input is a message.\n"
    "DIRECTORY is a model of lowbit with lowbit.plan and lowbit.tokens, from: lowbit export DIRECTORY --to plan\n"
    "\n"
    "  -p, --prompt TEXT         text to continue; - reads it from the input\n"
    "  --chat                    -p is a message: apply the chat template\n"
    "  --system TEXT             system prompt of a conversation\n"
    "  --max-new-tokens N        default 128 with -p; in a conversation the model's, or 1024\n"
    "  --max-length N            tokens of the context, a multiple of 16\n"
    "  --temperature T           0 takes the most likely token; default 0 with -p, in a conversation the model's\n"
    "  --top-p P, --top-k K, --min-p P, --repetition-penalty R\n"
    "  --seed N                  seed of sampling; default 0\n"
    "  --cache TYPE              type of the KV cache: float32, bfloat16, float16, int8, int4, or KEYS,VALUES\n"
    "  --threads N               default: one for each CPU\n";
constexpr int64_t kContext = 4096, kAnswer = 1024, kContinuation = 128;  // tokens
constexpr uint64_t kMostChecked = 1 << 20;                               // bytes of a file whose checksum is computed

struct Options {
  std::string directory, prompt, system;
  bool continues = false, chat = false, has_system = false;
  int64_t max_new_tokens = 0, max_length = 0, threads = 0;  // 0: the default
  uint64_t seed = 0;
  TextCache keys = TextCache::f32, values = TextCache::f32;
  bool has_cache = false;
  bool sampling_given[5] = {};
  Sampling sampling;
};

Status read_integer(const char* name, const std::string& text, int64_t least, int64_t* value) {
  const char* const end = text.data() + text.size();
  const auto [stopped, error] = std::from_chars(text.data(), end, *value);
  if (error == std::errc() && stopped == end && *value >= least) return {};
  return Status::error("%s is '%s'; expected a whole number, %" PRId64 " or more", name, text.c_str(), least);
}

Status read_real(const char* name, const std::string& text, double* value) {
  char* end = nullptr;
  *value = std::strtod(text.c_str(), &end);
  if (!text.empty() && end == text.c_str() + text.size()) return {};
  return Status::error("%s is '%s'; expected a number", name, text.c_str());
}

Status read_cache(const std::string& text, Options* options) {
  const size_t comma = text.find(',');
  options->has_cache = true;
  if (cache_named(text.substr(0, comma), &options->keys) &&
      cache_named(comma == std::string::npos ? text : text.substr(comma + 1), &options->values)) {
    return {};
  }
  return Status::error("--cache is '%s'; expected float32, bfloat16, float16, int8 or int4", text.c_str());
}

Status read_all(std::FILE* file, std::string* text) {
  char block[65536];
  size_t count;
  while ((count = std::fread(block, 1, sizeof block, file)) > 0) text->append(block, count);
  return std::ferror(file) ? Status::system("the input cannot be read") : Status();
}

Status read_option(const std::string& name, const std::string& value, Options* options) {
  const struct {
    const char* name;
    double* number;
  } reals[] = {{"--temperature", &options->sampling.temperature},
               {"--top-p", &options->sampling.top_p},
               {"--min-p", &options->sampling.min_p},
               {"--repetition-penalty", &options->sampling.repetition_penalty}};
  for (size_t i = 0; i < std::size(reals); ++i) {
    if (name != reals[i].name) continue;
    options->sampling_given[i] = true;
    return read_real(name.c_str(), value, reals[i].number);
  }
  if (name == "--top-k") {
    options->sampling_given[4] = true;
    return read_integer("--top-k", value, 1, &options->sampling.top_k);
  }
  if (name == "-p" || name == "--prompt") {
    options->continues = true;
    if (value == "-") return read_all(stdin, &options->prompt);
    options->prompt = value;
    return {};
  }
  if (name == "--system") {
    options->has_system = true;
    options->system = value;
    return {};
  }
  if (name == "--max-new-tokens") return read_integer(name.c_str(), value, 1, &options->max_new_tokens);
  if (name == "--max-length") return read_integer(name.c_str(), value, 16, &options->max_length);
  if (name == "--threads") return read_integer(name.c_str(), value, 1, &options->threads);
  if (name == "--cache") return read_cache(value, options);
  if (name == "--seed") {
    int64_t seed = 0;
    const char* const end = value.data() + value.size();
    const auto [stopped, error] = std::from_chars(value.data(), end, options->seed);
    if (error == std::errc() && stopped == end) return {};
    Status status = read_integer("--seed", value, INT64_MIN, &seed);
    options->seed = static_cast<uint64_t>(seed);
    return status;
  }
  return Status::error("there is no option %s; lowbit-run --help lists them", name.c_str());
}

Status read_options(int argc, char** argv, Options* options) {
  for (int i = 1; i < argc; ++i) {
    std::string name = argv[i], value;
    if (name == "--chat") {
      options->chat = true;
      continue;
    }
    if (name.empty() || name[0] != '-' || name == "-") {
      if (!options->directory.empty()) return Status::error("there are two directories, %s and %s; expected one",
                                                            options->directory.c_str(), name.c_str());
      options->directory = name;
      continue;
    }
    const size_t equal = name.find('=');
    if (name.compare(0, 2, "--") == 0 && equal != std::string::npos) {
      value = name.substr(equal + 1);
      name.resize(equal);
    } else {
      if (++i == argc) return Status::error("%s has no value; lowbit-run --help lists the options", name.c_str());
      value = argv[i];
    }
    if (Status status = read_option(name, value, options); !status.ok()) return status;
  }
  if (options->directory.empty()) return Status::error("there is no directory of a model; expected lowbit-run DIRECTORY");
  if (options->chat && !options->continues) return Status::error("--chat is given without -p; expected both or none");
  if (options->has_system && options->continues && !options->chat) {
    return Status::error("--system is given with -p; expected --chat as well");
  }
  return options->sampling.check();
}

enum class Ending { stop, max_new_tokens, max_length };

// A model, its tokenizer and one text.
class Program {
 public:
  explicit Program(const Options& options) : options_(options) {}

  Status open() {
    const std::string plan = options_.directory + "/lowbit.plan", tokens = options_.directory + "/lowbit.tokens";
    uint32_t checksum = 0;
    for (const std::string& file : {tokens, plan}) {
      std::FILE* const there = std::fopen(file.c_str(), "rb");
      if (there == nullptr) {
        return Status::system("%s does not open; to write it: lowbit export DIRECTORY --to plan", file.c_str());
      }
      const bool read = std::fseek(there, -4, SEEK_END) == 0 && std::fread(&checksum, 4, 1, there) == 1;
      std::fclose(there);
      if (!read) return Status::error("%s is too short", file.c_str());
    }
    if (Status status = Tokenizer::open(tokens, &tokenizer_); !status.ok()) return status;
    if (tokenizer_->settings().plan != 0 && tokenizer_->settings().plan != checksum) {
      return Status::error("%s belongs to another plan than %s; to write both: lowbit export DIRECTORY --to plan",
                           tokens.c_str(), plan.c_str());
    }
    const int64_t cpus = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
    const int64_t threads = std::min<int64_t>(1024, options_.threads != 0 ? options_.threads : cpus);
    if (Status status = PlanModel::open(plan, static_cast<int>(threads), &model_); !status.ok()) return status;
    return check_settings(plan);
  }

  // Refuses a plan if a file beside it that says what the model computes, or how texts begin and end, has changed since the
  // plan was made. On a device such files may be missing. Of a large tokenizer.json only the size is compared.
  Status check_settings(const std::string& plan) const {
    const auto fact = model_->plan().about.find("program");
    if (fact == model_->plan().about.end()) return {};
    std::string description;  // JSON as Python writes it, 7 bytes in each number but the first
    for (size_t i = 1; i < fact->second.size(); ++i) {
      for (int bit = 0; bit < 56; bit += 8) description += static_cast<char>(fact->second[i] >> bit);
    }
    for (const char* name : {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
                             "chat_template.jinja"}) {
      const std::string key = std::string("\"") + name + "\": ";  // and [size, checksum], or null for no file
      const size_t at = description.find(key);
      if (at == std::string::npos) continue;
      uint64_t size = 0, count = 0;
      uint32_t sum = 0, found = 0;
      const char* const value = description.c_str() + at + key.size();
      const bool was_there = std::sscanf(value, "[%" SCNu64 ", %" SCNu32, &size, &sum) == 2;
      std::FILE* const there = std::fopen((options_.directory + "/" + name).c_str(), "rb");
      if (there == nullptr) continue;
      char content[4096];
      const bool is_large = size > kMostChecked;
      if (is_large && std::fseek(there, 0, SEEK_END) == 0) count = static_cast<uint64_t>(std::ftell(there));
      while (const size_t read = is_large ? 0 : std::fread(content, 1, sizeof content, there)) {
        found = checksum(content, read, found);
        count += read;
      }
      std::fclose(there);
      if (!was_there || count != size || (!is_large && found != sum)) {
        return Status::error("%s beside %s has changed since the plan was made; to write a new one: lowbit export DIRECTORY "
                             "--to plan", name, plan.c_str());
      }
    }
    return {};
  }

  Status continue_text() {
    std::vector<int64_t> prompt;
    if (options_.chat) {
      const Conversation conversation{options_.has_system, options_.system, {options_.prompt}};
      if (Status status = tokenizer_->chat(conversation, &prompt); !status.ok()) return status;
    } else if (Status status = tokenizer_->encode(options_.prompt, true, &prompt); !status.ok()) {
      return status;
    }
    if (prompt.empty()) return Status::error("the prompt has no tokens; expected at least one");
    const int64_t most = options_.max_new_tokens != 0 ? options_.max_new_tokens : kContinuation;
    const int64_t positions = model_->positions();
    const int64_t needed = std::min(positions, static_cast<int64_t>(prompt.size()) + std::min(most, positions));
    if (Status status = begin((needed + 15) / 16 * 16); !status.ok()) return status;
    if (static_cast<int64_t>(prompt.size()) >= length_) {
      return Status::error("the prompt has %zu tokens; expected fewer than the context's %" PRId64, prompt.size(), length_);
    }
    std::string text;
    Ending ending;
    return generate(prompt, options_.sampling, most, options_.seed, &text, &ending);
  }

  Status talk() {
    const TextSettings& settings = tokenizer_->settings();
    Sampling sampling = options_.sampling;
    const double defaults[] = {settings.temperature, settings.top_p, settings.min_p, settings.repetition_penalty};
    double* const numbers[] = {&sampling.temperature, &sampling.top_p, &sampling.min_p, &sampling.repetition_penalty};
    for (size_t i = 0; i < std::size(numbers); ++i) {
      if (!options_.sampling_given[i]) *numbers[i] = defaults[i];
    }
    if (!options_.sampling_given[4]) sampling.top_k = settings.top_k;
    if (Status status = sampling.check(); !status.ok()) return status;
    if (Status status = begin(std::min(kContext, model_->positions())); !status.ok()) return status;
    if (Status status = reset(options_.has_system, options_.system); !status.ok()) return status;
    const bool typed = isatty(fileno(stdin));
    std::string line;
    for (;;) {
      if (typed) std::fputs("> ", stderr);
      bool more = false;
      if (Status status = read_line(&line, &more); !status.ok() || !more) return status;
      if (line == "/quit" || line == "/exit") return {};
      Status status;
      if (line == "/reset") {
        status = reset(has_system_, system_);
      } else if (line.compare(0, 7, "/system") == 0 && (line.size() == 7 || line[7] == ' ')) {
        const size_t from = line.find_first_not_of(' ', 7);
        status = reset(from != std::string::npos, from == std::string::npos ? "" : line.substr(from));
      } else if (line[0] == '/') {
        status = Status::error("there is no command %.100s; expected /reset, /system TEXT or /quit, or a space before the /",
                               line.c_str());
      } else if (line.find_first_not_of(" \t\v\f\r") != std::string::npos) {
        status = answer(line, sampling);
      }
      if (!status.ok() && !typed) return status;
      if (!status.ok()) std::fprintf(stderr, "lowbit-run: %s\n", status.message());
    }
  }

 private:
  Status read_line(std::string* line, bool* more) {
    line->clear();
    int letter;
    while ((letter = std::getc(stdin)) != EOF && letter != '\n') line->push_back(static_cast<char>(letter));
    if (std::ferror(stdin)) return Status::system("the input cannot be read");
    *more = letter != EOF || !line->empty();
    while (!line->empty() && line->back() == '\r') line->pop_back();
    return {};
  }

  Status begin(int64_t length) {
    length_ = options_.max_length != 0 ? options_.max_length : std::min(length, model_->positions() / 16 * 16);
    if (length_ % 16 != 0) return Status::error("--max-length is %" PRId64 "; expected a multiple of 16", length_);
    const TextSettings& settings = tokenizer_->settings();
    const TextCache keys = options_.has_cache ? options_.keys : static_cast<TextCache>(settings.keys);
    const TextCache values = options_.has_cache ? options_.values : static_cast<TextCache>(settings.values);
    logits_.resize(static_cast<size_t>(model_->vocabulary()));
    return model_->begin(length_, keys, values, &session_);
  }

  // Begins a conversation.
  Status reset(bool has_system, const std::string& system) {
    std::vector<int64_t> tokens;
    if (Status status = tokenizer_->chat({has_system, system, {"?"}}, &tokens); !status.ok()) return status;
    if (static_cast<int64_t>(tokens.size()) >= length_) {
      return Status::error("the system prompt takes %zu tokens with its template; expected fewer than the context's %" PRId64,
                           tokens.size(), length_);
    }
    has_system_ = has_system, system_ = system;
    turns_.clear();
    return {};
  }

  // The tokens of the conversation with a new message, without the oldest turns.
  Status tokens_of(const std::string& message, size_t forgotten, std::vector<int64_t>* tokens) const {
    Conversation conversation{has_system_, system_, {turns_.begin() + static_cast<ptrdiff_t>(2 * forgotten), turns_.end()}};
    conversation.messages.push_back(message);
    return tokenizer_->chat(conversation, tokens);
  }

  Status answer(const std::string& message, const Sampling& sampling) {
    const int64_t own = tokenizer_->settings().max_new_tokens;
    const int64_t most = options_.max_new_tokens != 0 ? options_.max_new_tokens : own != 0 ? own : kAnswer;
    std::vector<int64_t> prompt;
    size_t forgotten = 0;
    if (Status status = tokens_of(message, 0, &prompt); !status.ok()) return status;
    if (static_cast<int64_t>(prompt.size()) + std::min(most, length_ / 4) > length_) {
      // Frees half of the context at once, because all tokens that stay move and must be computed again.
      while (2 * forgotten < turns_.size() && static_cast<int64_t>(prompt.size()) > length_ / 2) {
        if (Status status = tokens_of(message, ++forgotten, &prompt); !status.ok()) return status;
      }
    }
    if (static_cast<int64_t>(prompt.size()) >= length_) {
      return Status::error("the message takes %zu tokens with its template; expected fewer than the context's %" PRId64,
                           prompt.size(), length_);
    }
    std::string text;
    Ending ending;
    const uint64_t seed = options_.seed + answers_;
    if (Status status = generate(prompt, sampling, most, seed, &text, &ending); !status.ok()) return status;
    turns_.erase(turns_.begin(), turns_.begin() + static_cast<ptrdiff_t>(2 * forgotten));
    turns_.insert(turns_.end(), {message, text});
    ++answers_;
    if (forgotten != 0) {
      std::fprintf(stderr, "(the context of %" PRId64 " tokens was full: the %zu oldest turns were dropped)\n", length_,
                   forgotten);
    }
    if (ending == Ending::max_length) {
      std::fprintf(stderr, "(the context of %" PRId64 " tokens is full: the answer ends here)\n", length_);
    } else if (ending == Ending::max_new_tokens) {
      std::fprintf(stderr, "(cut off after %" PRId64 " tokens, see --max-new-tokens)\n", most);
    }
    return {};
  }

  // Prints the text after a prompt as it comes.
  Status generate(const std::vector<int64_t>& prompt, const Sampling& sampling, int64_t most, uint64_t seed, std::string* text,
                  Ending* ending) {
    for (const int64_t token : prompt) {
      if (token < model_->vocabulary()) continue;
      return Status::error("the tokenizer gives the token %" PRId64 "; expected less than %" PRId64 ", the model's vocabulary",
                           token, model_->vocabulary());
    }
    size_t same = 0;  // tokens that the caches hold; the last one must be computed
    const std::vector<int64_t>& cached = session_->tokens();
    while (same + 1 < prompt.size() && same < cached.size() && prompt[same] == cached[same]) ++same;
    if (session_->recurrent() && static_cast<int64_t>(same) != session_->position()) same = 0;
    if (Status status = session_->cut(static_cast<int64_t>(same)); !status.ok()) return status;
    RandomNumbers random(seed);
    TokenStream stream(*tokenizer_, prompt);
    std::set<int64_t> seen(prompt.begin(), prompt.end());
    std::vector<int64_t> next(prompt.begin() + static_cast<ptrdiff_t>(same), prompt.end());
    const int64_t room = std::min(most, length_ - static_cast<int64_t>(prompt.size()));
    *ending = room < most ? Ending::max_length : Ending::max_new_tokens;
    const std::vector<int64_t>& stop = tokenizer_->settings().stop;
    for (int64_t count = 0; count < room; ++count) {
      const auto rows = static_cast<int64_t>(next.size());
      if (Status status = model_->feed(*session_, next.data(), rows, logits_.data()); !status.ok()) return status;
      int64_t token = 0;
      if (Status status = draw(sampling, seen, logits_, random, &token); !status.ok()) return status;
      if (std::find(stop.begin(), stop.end(), token) != stop.end()) {
        *ending = Ending::stop;
        break;
      }
      std::string piece;
      if (Status status = stream.push(token, &piece); !status.ok()) return status;
      *text += piece;
      if (std::fwrite(piece.data(), 1, piece.size(), stdout) != piece.size() || std::fflush(stdout) != 0) {
        return Status::system("the output cannot be written");
      }
      seen.insert(token);
      next = {token};
    }
    std::puts("");
    return std::fflush(stdout) == 0 ? Status() : Status::system("the output cannot be written");
  }

  const Options& options_;
  std::unique_ptr<Tokenizer> tokenizer_;
  std::unique_ptr<PlanModel> model_;
  std::unique_ptr<PlanSession> session_;
  int64_t length_ = 0;
  std::vector<float> logits_;
  bool has_system_ = false;
  std::string system_;
  std::vector<std::string> turns_;  // messages and answers in turn
  uint64_t answers_ = 0;
};

Status run(const Options& options) {
  Program program(options);
  if (Status status = program.open(); !status.ok()) return status;
  return options.continues ? program.continue_text() : program.talk();
}

}  // namespace

int main(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--help") != 0 && std::strcmp(argv[i], "-h") != 0) continue;
    std::fputs(kUsage, stdout);
    return 0;
  }
  try {
    Options options;
    Status status = read_options(argc, argv, &options);
    const bool understood = status.ok();
    if (understood) status = run(options);
    if (status.ok()) return 0;
    std::fprintf(stderr, "lowbit-run: %s\n", status.message());
    return understood ? 1 : 2;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "lowbit-run: %s\n", error.what());
    return 1;
  }
}

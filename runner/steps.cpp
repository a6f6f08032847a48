#include "steps.h"

#include <algorithm>

#include "utf8.h"

namespace lowbit::text {
namespace {

constexpr uint32_t kLead = 0x1100, kVowel = 0x1161, kTail = 0x11a7, kSyllable = 0xac00;  // first code points of Hangul
constexpr uint32_t kVowels = 21, kTails = 28, kSyllables = 11172;
constexpr size_t kMostGrapheme = 5;  // bytes

// What the numbers of each step are, so that read() can check them.
enum class Number : uint8_t { none, map, entries, pattern, text, flag, two, behavior, klass, count };

constexpr Number kStepNumbers[][5] = {
    {Number::map, Number::entries},
    {Number::map, Number::entries, Number::map, Number::entries, Number::flag},
    {Number::pattern, Number::text},
    {Number::text, Number::two},
    {Number::klass, Number::flag, Number::flag},
    {},
    {Number::pattern, Number::behavior, Number::flag},
    {Number::klass, Number::text},
    {Number::pattern, Number::map, Number::entries, Number::map, Number::entries},
};
constexpr Number kDecodeNumbers[][5] = {
    {}, {}, {}, {Number::text, Number::text}, {Number::text, Number::count, Number::count}, {Number::text, Number::flag},
    {Number::text, Number::flag}, {Number::text}, {Number::pattern, Number::text}, {Number::text, Number::text, Number::flag},
};

void replace_all(std::string_view from, std::string_view to, std::string* text) {
  for (size_t at = 0; !from.empty() && (at = text->find(from, at)) != std::string::npos; at += to.size()) {
    text->replace(at, from.size(), to);
  }
}

bool starts_with(std::string_view text, std::string_view start) { return text.substr(0, start.size()) == start; }

// Whether the token is <0xAB>.
bool is_byte_token(std::string_view token, int* byte) {
  if (token.size() != 6 || !starts_with(token, "<0x") || token[5] != '>') return false;
  *byte = 0;
  for (const char each : token.substr(3, 2)) {
    const int digit = each >= '0' && each <= '9' ? each - '0' : each >= 'A' && each <= 'F' ? each - 'A' + 10
                      : each >= 'a' && each <= 'f' ? each - 'a' + 10 : -1;
    if (digit < 0) return false;
    *byte = *byte * 16 + digit;
  }
  return true;
}

void clean_up(std::string* text) {
  constexpr const char* kCleaned[][2] = {
      {" .", "."}, {" ?", "?"}, {" !", "!"}, {" ,", ","}, {" ' ", "'"}, {" n't", "n't"}, {" 'm", "'m"},
      {" do not", " don't"}, {" 's", "'s"}, {" 've", "'ve"}, {" 're", "'re"}};
  for (const auto& [from, to] : kCleaned) replace_all(from, to, text);
}

// Runs of byte tokens become the text of their bytes; if that is not UTF-8, each becomes a U+FFFD.
std::vector<std::string> without_byte_tokens(const std::vector<std::string>& tokens) {
  std::vector<std::string> result;
  std::string bytes;
  const auto flush = [&] {
    if (bytes.empty()) return;
    if (first_wrong(bytes) == bytes.size()) {
      result.push_back(bytes);
    } else {
      result.insert(result.end(), bytes.size(), kReplacement);
    }
    bytes.clear();
  };
  for (const std::string& token : tokens) {
    int byte;
    if (is_byte_token(token, &byte)) {
      bytes.push_back(static_cast<char>(byte));
    } else {
      flush();
      result.push_back(token);
    }
  }
  flush();
  return result;
}

}  // namespace

Steps::Steps(const TokensFile& file) : file_(file) {
  letter_bytes_.fill(-1);
  uint32_t next = 256;  // letters from here on stand for the bytes that are not visible letters of Latin-1
  for (uint32_t byte = 0; byte < 256; ++byte) {
    const bool visible = (byte > 0x20 && byte < 0x7f) || (byte > 0xa0 && byte != 0xad);
    const uint32_t letter = visible ? byte : next++;
    append_character(letter, &byte_letters_[byte]);
    letter_bytes_[letter] = static_cast<int>(byte);
  }
}

Status Steps::read(Head& head) {
  if (Status status = read_list(head, &normalizers_, static_cast<uint32_t>(StepOp::count), "a normalizer"); !status.ok()) {
    return status;
  }
  if (Status status = read_list(head, &cutters_, static_cast<uint32_t>(StepOp::count), "a pre-tokenizer"); !status.ok()) {
    return status;
  }
  decodes_ = head.number("whether there is a decoder", 0, 1) != 0;
  return read_list(head, &decoders_, static_cast<uint32_t>(DecodeOp::count), "a decoder");
}

Status Steps::read_list(Head& head, std::vector<Step>* steps, uint32_t kinds, const char* name) {
  const bool decoding = steps == &decoders_;
  const uint32_t count = head.number("the number of steps", 0, 64);
  for (uint32_t i = 0; i < count && head.status().ok(); ++i) {
    Step& step = steps->emplace_back(Step{head.number(name, 0, kinds - 1), 0, 0, 0, 0, 0});
    if (steps == &normalizers_ && static_cast<StepOp>(step.op) == StepOp::split) {
      return Status::error("the tokens file has a normalizer that splits; it is damaged");
    }
    uint32_t* const numbers[] = {&step.a, &step.b, &step.c, &step.d, &step.e};
    uint32_t map = 0;
    for (int j = 0; j < 5; ++j) {
      uint32_t most = 0;
      switch ((decoding ? kDecodeNumbers : kStepNumbers)[step.op][j]) {
        case Number::none: continue;
        case Number::map: most = map = static_cast<uint32_t>(file_.maps.size); break;
        case Number::entries: most = map - *numbers[j - 1]; break;
        case Number::pattern: most = static_cast<uint32_t>(file_.code.size) - 1; break;
        case Number::text: most = file_.text_count - 1; break;
        case Number::flag: most = 1; break;
        case Number::two: most = 2; break;
        case Number::behavior: most = static_cast<uint32_t>(Behavior::count) - 1; break;
        case Number::klass: most = static_cast<uint32_t>(file_.classes.size()) - 1; break;
        case Number::count: most = 1 << 16; break;
      }
      if (most == kNone) return Status::error("the tokens file has no patterns or classes for %s", name);
      *numbers[j] = head.number(name, 0, most);
    }
    if (decoding) continue;
    // The entries of maps are texts, except in the second map of a normalization, where they are numbers.
    bool texts = true;
    const auto check = [&](uint32_t at, uint32_t entries, bool from_texts) {
      for (uint32_t j = at; j < at + entries; ++j) {
        texts = texts && file_.maps[j].to < file_.text_count && (!from_texts || file_.maps[j].from < file_.text_count);
      }
    };
    const auto op = static_cast<StepOp>(step.op);
    if (op == StepOp::map || op == StepOp::normalize) check(step.a, step.b, false);
    if (op == StepOp::charsmap) check(step.b, step.c, false), check(step.d, step.e, true);
    if (!texts) return Status::error("the tokens file has a map to a missing text");
  }
  return head.status();
}

const Pair* Steps::entry(uint32_t at, uint32_t count, uint32_t character) const {
  const Pair *const begin = file_.maps.data + at, *const end = begin + count;
  const Pair* const found = std::lower_bound(begin, end, character, [](const Pair& a, uint32_t b) { return a.from < b; });
  return found != end && found->from == character ? found : nullptr;
}

Status Steps::normalize(Matcher& matcher, std::string* text) const {
  for (const Step& step : normalizers_) {
    if (Status status = apply(step, matcher, true, text); !status.ok()) return status;
  }
  return {};
}

Status Steps::apply(const Step& step, Matcher& matcher, bool first, std::string* text) const {
  switch (static_cast<StepOp>(step.op)) {
    case StepOp::map: {
      std::string result;
      map(step.a, step.b, *text, &result);
      *text = std::move(result);
      break;
    }
    case StepOp::normalize: compose(step, text); break;
    case StepOp::replace: return replace(step, matcher, text);
    case StepOp::charsmap: charsmap(step, matcher, text); break;
    case StepOp::prepend: {
      const std::string_view start = file_.text(step.a);
      const bool there = step.b != 0 && (starts_with(*text, start) || (step.b == 2 && !first));
      if (!there && !text->empty()) text->insert(0, start);
      break;
    }
    case StepOp::strip: {
      uint32_t character;
      size_t begin = 0, end = text->size();
      while (step.b != 0 && begin < end) {
        const size_t length = character_at(*text, begin, &character);
        if (!file_.classes[step.a].has(character)) break;
        begin += length;
      }
      while (step.c != 0 && begin < end) {
        const size_t before = character_before(*text, end);
        character_at(*text, before, &character);
        if (!file_.classes[step.a].has(character)) break;
        end = before;
      }
      *text = text->substr(begin, end - begin);
      break;
    }
    case StepOp::bytes: {
      std::string result;
      for (const char each : *text) result += byte_letters_[static_cast<uint8_t>(each)];
      *text = std::move(result);
      break;
    }
    case StepOp::surround: {
      std::string result;
      for (size_t at = 0, length; at < text->size(); at += length) {
        uint32_t character;
        length = character_at(*text, at, &character);
        const std::string_view around = file_.classes[step.a].has(character) ? file_.text(step.b) : std::string_view();
        result.append(around).append(*text, at, length).append(around);
      }
      *text = std::move(result);
      break;
    }
    default: break;
  }
  return matcher.status();
}

Status Steps::replace(const Step& step, Matcher& matcher, std::string* text) const {
  std::string result;
  size_t from = 0, begin, end;
  while (matcher.find(step.a, *text, from, &begin, &end)) {
    result.append(*text, from, begin - from) += file_.text(step.b);
    from = end;
  }
  text->replace(0, from, result);
  return matcher.status();
}

void Steps::charsmap(const Step& step, Matcher& matcher, std::string* text) const {
  const auto by_text = [&](const Pair& each, std::string_view wanted) { return file_.text(each.from) < wanted; };
  const Pair *const first = file_.maps.data + step.d, *const last = first + step.e;
  const auto shortest = [&](std::string_view part) -> const Pair* {
    uint32_t character;
    size_t size = character_at(part, 0, &character);
    const Pair* found = entry(step.b, step.c, character);
    while (found == nullptr && size < part.size()) {
      size += character_length(part, size);
      const std::string_view start = part.substr(0, size);
      const Pair* const at = std::lower_bound(first, last, start, by_text);
      if (at != last && file_.text(at->from) == start) found = at;
    }
    return found;
  };
  std::string result;
  size_t from = 0, begin, end;
  while (matcher.find(step.a, *text, from, &begin, &end)) {
    result.append(*text, from, begin - from);
    const Pair* const found = end - begin <= kMostGrapheme ? shortest({text->data() + begin, end - begin}) : nullptr;
    if (found != nullptr) {
      result += file_.text(found->to);
    } else {
      map(step.b, step.c, {text->data() + begin, end - begin}, &result);
    }
    from = end;
  }
  text->replace(0, from, result);
}

// Appends a text with changed characters.
void Steps::map(uint32_t at, uint32_t count, std::string_view text, std::string* result) const {
  for (size_t from = 0, length; from < text.size(); from += length) {
    uint32_t character;
    length = character_at(text, from, &character);
    if (const Pair* const found = entry(at, count, character)) {
      *result += file_.text(found->to);
    } else {
      result->append(text, from, length);
    }
  }
}

// Unicode's normalization forms: decomposes, orders marks, and composes if the step says so.
void Steps::compose(const Step& step, std::string* text) const {
  struct Character {
    uint32_t character, mark;
  };
  std::vector<Character> all;
  const auto add = [&](uint32_t character) {
    const Pair* const found = entry(step.c, step.d, character);
    all.push_back({character, found == nullptr ? 0 : found->to});
  };
  uint32_t character;
  for (size_t at = 0; at < text->size();) {
    at += character_at(*text, at, &character);
    if (const uint32_t syllable = character - kSyllable; syllable < kSyllables) {
      add(kLead + syllable / (kVowels * kTails));
      add(kVowel + syllable / kTails % kVowels);
      if (syllable % kTails != 0) add(kTail + syllable % kTails);
    } else if (const Pair* const found = entry(step.a, step.b, character)) {
      const std::string_view parts = file_.text(found->to);
      for (size_t i = 0; i < parts.size();) {
        i += character_at(parts, i, &character);
        add(character);
      }
    } else {
      add(character);
    }
  }
  for (auto at = all.begin(); at != all.end();) {
    const auto end = std::find_if(at, all.end(), [](const Character& each) { return each.mark == 0; });
    std::stable_sort(at, end, [](const Character& a, const Character& b) { return a.mark < b.mark; });
    at = end == all.end() ? end : end + 1;
  }
  const auto composed = [&](uint32_t first, uint32_t second) {
    if (first - kLead < 19 && second - kVowel < kVowels) {
      return kSyllable + ((first - kLead) * kVowels + (second - kVowel)) * kTails;
    }
    if (first - kSyllable < kSyllables && (first - kSyllable) % kTails == 0 && second - kTail - 1 < kTails - 1) {
      return first + (second - kTail);
    }
    const auto less = [](const Composition& a, const Composition& b) {
      return a.first != b.first ? a.first < b.first : a.second < b.second;
    };
    const Composition wanted{first, second, 0, 0};
    const Composition* const found =
        std::lower_bound(file_.compositions.begin(), file_.compositions.end(), wanted, less);
    return found != file_.compositions.end() && !less(wanted, *found) ? found->character : kNone;
  };
  std::vector<Character> result;
  size_t starter = static_cast<size_t>(-1);
  for (const Character& each : all) {
    if (step.e != 0 && starter < result.size() && (starter + 1 == result.size() || result.back().mark < each.mark)) {
      if (const uint32_t joined = composed(result[starter].character, each.character); joined != kNone) {
        result[starter].character = joined;
        continue;
      }
    }
    if (each.mark == 0) starter = result.size();
    result.push_back(each);
  }
  text->clear();
  for (const Character& each : result) append_character(each.character, text);
}

Status Steps::cut(Matcher& matcher, std::vector<Piece>* pieces) const {
  for (const Step& step : cutters_) {
    if (static_cast<StepOp>(step.op) != StepOp::split) {
      for (Piece& piece : *pieces) {
        if (Status status = apply(step, matcher, piece.first, &piece.text); !status.ok()) return status;
      }
      continue;
    }
    std::vector<Piece> result;
    for (const Piece& piece : *pieces) {
      if (Status status = split(step, matcher, piece, &result); !status.ok()) return status;
    }
    *pieces = std::move(result);
  }
  return {};
}

Status Steps::split(const Step& step, Matcher& matcher, const Piece& piece, std::vector<Piece>* pieces) const {
  struct Part {
    size_t begin, end;
    bool match;
  };
  std::vector<Part> parts;
  const bool inverted = step.c != 0;
  const auto behavior = static_cast<Behavior>(step.b);
  bool previous = false;  // whether the part before was a match
  const auto add = [&](size_t begin, size_t end, bool match) {
    if (begin == end) return;
    const bool joins = !parts.empty() && ((behavior == Behavior::with_previous && match && !previous) ||
                                          (behavior == Behavior::with_next && !match && previous && parts.back().match) ||
                                          (behavior == Behavior::contiguous && match == previous));
    previous = match;
    if (joins) {
      parts.back().end = end;
      parts.back().match = match;
    } else {
      parts.push_back({begin, end, match});
    }
  };
  size_t from = 0, begin, end;
  while (matcher.find(step.a, piece.text, from, &begin, &end)) {
    add(from, begin, inverted);
    add(begin, end, !inverted);
    from = end;
  }
  if (Status status = matcher.status(); !status.ok()) return status;
  add(from, piece.text.size(), inverted);
  for (const Part& part : parts) {
    if (behavior == Behavior::removed && part.match) continue;
    pieces->push_back({piece.text.substr(part.begin, part.end - part.begin), piece.first && part.begin == 0});
  }
  return {};
}

Status Steps::decode(Matcher& matcher, std::vector<std::string> tokens, std::string* text) const {
  for (const Step& step : decoders_) {
    if (Status status = decode(step, matcher, &tokens); !status.ok()) return status;
  }
  text->clear();
  for (size_t i = 0; i < tokens.size(); ++i) (*text += decodes_ || i == 0 ? "" : " ") += tokens[i];
  return {};
}

std::string Steps::from_byte_letters(const std::vector<std::string>& tokens) const {
  std::string bytes, part;
  for (const std::string& token : tokens) {
    part.clear();
    bool all = true;
    uint32_t character;
    for (size_t at = 0; at < token.size() && all;) {
      at += character_at(token, at, &character);
      all = character < letter_bytes_.size() && letter_bytes_[character] >= 0;
      if (all) part.push_back(static_cast<char>(letter_bytes_[character]));
    }
    bytes += all ? part : token;
  }
  return repaired(bytes);
}

Status Steps::decode(const Step& step, Matcher& matcher, std::vector<std::string>* tokens) const {
  const auto text = [&](uint32_t index) { return file_.text(index); };
  switch (static_cast<DecodeOp>(step.op)) {
    case DecodeOp::bytes: *tokens = {from_byte_letters(*tokens)}; break;
    case DecodeOp::byte_tokens: *tokens = without_byte_tokens(*tokens); break;
    case DecodeOp::fuse: {
      std::string all;
      for (const std::string& token : *tokens) all += token;
      *tokens = {all};
      break;
    }
    case DecodeOp::replace:
      for (std::string& token : *tokens) replace_all(text(step.a), text(step.b), &token);
      break;
    case DecodeOp::strip: {
      const std::string_view what = text(step.a);
      for (std::string& token : *tokens) {
        std::string_view left = token;
        for (uint32_t i = 0; i < step.b && starts_with(left, what) && !what.empty(); ++i) left.remove_prefix(what.size());
        for (uint32_t i = 0; i < step.c && left.size() >= what.size() && !what.empty(); ++i) {
          if (left.substr(left.size() - what.size()) != what) break;
          left.remove_suffix(what.size());
        }
        token = std::string(left);
      }
      break;
    }
    case DecodeOp::word_piece: {
      for (size_t i = 0; i < tokens->size(); ++i) {
        std::string& token = (*tokens)[i];
        if (i > 0) {
          if (starts_with(token, text(step.a))) {
            token.erase(0, text(step.a).size());
          } else {
            token = " " + token;
          }
        }
        if (step.b != 0) clean_up(&token);
      }
      break;
    }
    case DecodeOp::metaspace:
      for (size_t i = 0; i < tokens->size(); ++i) replace_all(text(step.a), i == 0 && step.b != 0 ? "" : " ", &(*tokens)[i]);
      break;
    case DecodeOp::suffix:
      for (size_t i = 0; i < tokens->size(); ++i) {
        replace_all(text(step.a), i + 1 == tokens->size() ? "" : " ", &(*tokens)[i]);
      }
      break;
    case DecodeOp::replace_pattern:
      for (std::string& token : *tokens) {
        if (Status status = replace(step, matcher, &token); !status.ok()) return status;
      }
      break;
    case DecodeOp::ctc: {
      tokens->erase(std::unique(tokens->begin(), tokens->end()), tokens->end());
      for (std::string& token : *tokens) {
        replace_all(text(step.a), "", &token);
        if (step.c == 0) continue;
        clean_up(&token);
        replace_all(text(step.b), " ", &token);
      }
      std::erase(*tokens, "");
      break;
    }
    case DecodeOp::count: break;
  }
  return {};
}

}  // namespace lowbit::text

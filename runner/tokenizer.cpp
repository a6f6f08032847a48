#include "tokenizer.h"

#include <algorithm>
#include <array>
#include <cinttypes>
#include <cstring>
#include <filesystem>
#include <map>
#include <new>

#include "../plan/mapped_file.h"
#include "chat_pieces.h"
#include "steps.h"
#include "subwords.h"
#include "utf8.h"

namespace lowbit {

using namespace text;

namespace {

constexpr size_t kMostBytes = size_t{1} << 26;  // of the longest text

using Range = std::pair<size_t, size_t>;

enum Flag : uint32_t { kSingleWord = 1, kStripLeft = 2, kStripRight = 4, kSpecial = 8, kControl = 16, kAllFlags = 31 };

struct Added {
  uint32_t token, flags;
  std::string_view text;
};

// Finds added tokens in a text: the longest that begins at a place.
class AddedTokens {
 public:
  void add(const Added& token) { tokens_.push_back(token); }

  void sort() {
    std::stable_sort(tokens_.begin(), tokens_.end(), [](const Added& a, const Added& b) { return a.text < b.text; });
    for (size_t byte = 0; byte < 256; ++byte) {
      const auto before = [&](const Added& each) { return static_cast<uint8_t>(each.text[0]) < byte; };
      starts_[byte] = static_cast<size_t>(std::partition_point(tokens_.begin(), tokens_.end(), before) - tokens_.begin());
    }
    starts_[256] = tokens_.size();
  }

  // The longest token that begins at `at` and for which `allowed(token, end)` is true; null: there is none.
  template <class Allowed>
  const Added* longest(std::string_view text, size_t at, const Allowed& allowed) const {
    const size_t first = static_cast<uint8_t>(text[at]);
    auto low = tokens_.begin() + static_cast<ptrdiff_t>(starts_[first]);
    auto high = tokens_.begin() + static_cast<ptrdiff_t>(starts_[first + 1]);
    const Added* best = nullptr;
    for (size_t end = at + 1; low != high; ++end) {
      if (low->text.size() == end - at && allowed(*low, end)) best = &*low;
      if (end == text.size()) break;
      const auto byte = static_cast<uint8_t>(text[end]);
      const auto next = [&](const Added& each) {
        return each.text.size() <= end - at ? -1 : static_cast<int>(static_cast<uint8_t>(each.text[end - at]));
      };
      low = std::partition_point(low, high, [&](const Added& each) { return next(each) < byte; });
      high = std::partition_point(low, high, [&](const Added& each) { return next(each) <= byte; });
    }
    return best;
  }

  const std::vector<Added>& all() const { return tokens_; }

 private:
  std::vector<Added> tokens_;
  std::array<size_t, 257> starts_{};
};

// A part of a text: an added token, or text for the next steps.
struct Segment {
  uint32_t token;  // kNone: text
  size_t begin, end;
};

}  // namespace

struct Tokenizer::Implementation {
  MappedFile mapped;
  std::vector<uint64_t> copied;
  TokensFile file;
  Subwords subwords{file};
  Steps steps{file};
  ChatPieces pieces{file};
  AddedTokens raw, normalized, control;
  std::vector<bool> special, forbidden;  // by token: left out of plain text; never made from a message
  std::map<uint32_t, uint32_t> shown;    // tokens that are decoded to another text than their own -> that text
  uint32_t size = 0, words = kNone, spaces = kNone, no_chat = kNone;
  std::vector<int64_t> before, after;  // tokens that are put around a text
  TextSettings settings;

  Status read(const void* data, size_t bytes);
  Status read_added(Head& head);
  Status read_settings(Head& head);
  std::vector<Segment> added(const AddedTokens& tokens, std::string_view text, const std::vector<Range>* places) const;
  // places: where control tokens may be; null: anywhere.
  Status encode(std::string_view text, const std::vector<Range>* places, std::vector<int64_t>* tokens) const;
  Status encode_text(Piece piece, Matcher& matcher, bool guarded, std::vector<uint32_t>* ids) const;
  Status render(const Conversation& conversation, std::vector<std::pair<std::string, bool>>* parts) const;

  bool class_has(uint32_t klass, std::string_view text, size_t at) const {
    uint32_t character;
    character_at(text, at, &character);
    return file.classes[klass].has(character);
  }
};

Status Tokenizer::Implementation::read(const void* data, size_t bytes) {
  if (Status status = file.read(data, bytes); !status.ok()) return status;
  Head head(file);
  if (const uint32_t refusal = head.or_none("a refusal", file.text_count); refusal != kNone) {
    return head.status().ok() ? Status::error("%.300s", std::string(file.text(refusal)).c_str()) : head.status();
  }
  size = head.number("the number of tokens", 1, file.text_count);
  if (Status status = subwords.read(head); !status.ok()) return status;
  if (Status status = read_added(head); !status.ok()) return status;
  if (Status status = steps.read(head); !status.ok()) return status;
  for (std::vector<int64_t>* const list : {&before, &after}) {
    const uint32_t count = head.number("the number of tokens around a text", 0, 16);
    for (uint32_t i = 0; i < count; ++i) list->push_back(head.number("a token", 0, size - 1));
  }
  if (Status status = read_settings(head); !status.ok()) return status;
  no_chat = head.or_none("a refusal", file.text_count);
  if (no_chat == kNone && head.status().ok()) {
    if (Status status = pieces.read(head); !status.ok()) return status;
  }
  if (!head.status().ok()) return head.status();
  return head.at_end() ? Status() : Status::error("the tokens file has more settings than expected; it is damaged");
}

Status Tokenizer::Implementation::read_added(Head& head) {
  const uint32_t classes = static_cast<uint32_t>(file.classes.size());
  words = head.or_none("the class of letters", classes);
  spaces = head.or_none("the class of spaces", classes);
  special.resize(size);
  // The model's tokens may be beyond `size` in a damaged file, so there is an entry for every text.
  forbidden.resize(file.text_count);
  const uint32_t count = head.number("the number of added tokens", 0, file.text_count);
  for (uint32_t i = 0; i < count && head.status().ok(); ++i) {
    const uint32_t token = head.number("an added token", 0, size - 1);
    const std::string_view content = file.text(token);
    const uint32_t decoded = head.text("the decoded text of an added token");
    if (file.text(decoded) != content) shown[token] = decoded;
    const uint32_t text = head.or_none("the normalized text of an added token", file.text_count);
    const uint32_t flags = head.number("the flags of an added token", 0, kAllFlags);
    if (((flags & kSingleWord) != 0 && words == kNone) || ((flags & (kStripLeft | kStripRight)) != 0 && spaces == kNone)) {
      return Status::error("the tokens file lacks the class of letters or spaces that token %u needs", token);
    }
    special[token] = (flags & kSpecial) != 0;
    forbidden[token] = (flags & kControl) != 0;
    const Added made{token, flags, text == kNone ? content : file.text(text)};
    if (made.text.empty() || content.empty()) continue;
    (text == kNone ? raw : normalized).add(made);
    if ((flags & kControl) != 0) control.add({token, flags, content});
  }
  raw.sort(), normalized.sort(), control.sort();
  return head.status();
}

Status Tokenizer::Implementation::read_settings(Head& head) {
  const uint32_t stops = head.number("the number of stop tokens", 0, 4096);
  for (uint32_t i = 0; i < stops; ++i) settings.stop.push_back(head.number("a stop token", 0, kNone));
  settings.keys = static_cast<int>(head.number("the type of keys", 0, 4));
  settings.values = static_cast<int>(head.number("the type of values", 0, 4));
  settings.temperature = head.real("temperature");
  settings.top_p = head.real("top_p");
  settings.min_p = head.real("min_p");
  settings.repetition_penalty = head.real("repetition_penalty");
  settings.top_k = head.number("top_k", 0, kNone);
  settings.max_new_tokens = head.number("max_new_tokens", 0, kNone);
  settings.plan = head.number("the checksum of the plan", 0, kNone);
  return head.status();
}

std::vector<Segment> Tokenizer::Implementation::added(const AddedTokens& tokens, std::string_view text,
                                                      const std::vector<Range>* places) const {
  std::vector<Segment> segments;
  size_t from = 0;  // the end of the segments
  for (size_t at = 0; at < text.size();) {
    const Added* const found = tokens.longest(text, at, [&](const Added& token, size_t end) {
      if (places == nullptr || (token.flags & kControl) == 0) return true;
      return std::binary_search(places->begin(), places->end(), Range(at, end));
    });
    if (found == nullptr) {
      ++at;
      continue;
    }
    size_t begin = at, end = at + found->text.size();
    at = end;
    if ((found->flags & kSingleWord) != 0 && ((begin > 0 && class_has(words, text, character_before(text, begin))) ||
                                              (end < text.size() && class_has(words, text, end)))) {
      continue;
    }
    while ((found->flags & kStripLeft) != 0 && begin > from && class_has(spaces, text, character_before(text, begin))) {
      begin = character_before(text, begin);
    }
    while ((found->flags & kStripRight) != 0 && end < text.size() && class_has(spaces, text, end)) {
      end += character_length(text, end);
    }
    if (from < begin) segments.push_back({kNone, from, begin});
    segments.push_back({found->token, begin, end});
    from = end;
  }
  if (from < text.size()) segments.push_back({kNone, from, text.size()});
  return segments;
}

Status Tokenizer::Implementation::encode(std::string_view text, const std::vector<Range>* places,
                                         std::vector<int64_t>* tokens) const {
  if (text.size() > kMostBytes) {
    return Status::out_of_range("the text has %zu bytes; expected at most %zu", text.size(), kMostBytes);
  }
  if (const size_t wrong = first_wrong(text); wrong != text.size()) {
    const unsigned byte = static_cast<uint8_t>(text[wrong]);
    return Status::error("the text is not UTF-8: byte %zu is 0x%02x", wrong, byte);
  }
  Matcher matcher(file, text.size());
  std::vector<uint32_t> ids;
  const bool guarded = places != nullptr;
  // Places are positions in the text before normalization, so with places all control tokens are searched there.
  AddedTokens both;
  if (guarded) {
    both = raw;
    for (const Added& token : control.all()) both.add(token);
    both.sort();
  }
  for (const Segment& segment : added(guarded ? both : raw, text, places)) {
    if (segment.token != kNone) {
      ids.push_back(segment.token);
      continue;
    }
    Piece piece{std::string(text.substr(segment.begin, segment.end - segment.begin)), segment.begin == 0};
    if (Status status = encode_text(std::move(piece), matcher, guarded, &ids); !status.ok()) return status;
  }
  tokens->insert(tokens->end(), ids.begin(), ids.end());
  return {};
}

Status Tokenizer::Implementation::encode_text(Piece piece, Matcher& matcher, bool guarded, std::vector<uint32_t>* ids) const {
  if (Status status = steps.normalize(matcher, &piece.text); !status.ok()) return status;
  const std::vector<Range> nowhere;
  for (const Segment& segment : added(normalized, piece.text, guarded ? &nowhere : nullptr)) {
    if (segment.token != kNone) {
      ids->push_back(segment.token);
      continue;
    }
    std::vector<Piece> cut{{piece.text.substr(segment.begin, segment.end - segment.begin), piece.first && segment.begin == 0}};
    if (Status status = steps.cut(matcher, &cut); !status.ok()) return status;
    for (const Piece& each : cut) subwords.encode(each.text, guarded ? &forbidden : nullptr, ids);
  }
  return {};
}

Status Tokenizer::Implementation::render(const Conversation& conversation,
                                         std::vector<std::pair<std::string, bool>>* parts) const {
  if (no_chat != kNone) return Status::error("%.300s", std::string(file.text(no_chat)).c_str());
  return pieces.render(conversation, parts);
}

Tokenizer::Tokenizer(std::unique_ptr<Implementation> implementation) : implementation_(std::move(implementation)) {}
Tokenizer::~Tokenizer() = default;
int64_t Tokenizer::size() const { return implementation_->size; }
const TextSettings& Tokenizer::settings() const { return implementation_->settings; }

std::vector<AddedToken> Tokenizer::added() const {
  const Implementation& made = *implementation_;
  std::vector<AddedToken> result;
  for (const AddedTokens* const tokens : {&made.raw, &made.normalized}) {
    for (const Added& each : tokens->all()) {
      const auto shown = made.shown.find(each.token);
      const uint32_t decoded = shown == made.shown.end() ? each.token : shown->second;
      result.push_back({each.token, std::string(made.file.text(each.token)), std::string(made.file.text(decoded)),
                        made.special[each.token]});
    }
  }
  return result;
}

Status Tokenizer::open(const std::string& given, std::unique_ptr<Tokenizer>* tokenizer) try {
  std::error_code none;
  const std::string path = std::filesystem::is_directory(given, none) ? given + "/lowbit.tokens" : given;
  auto made = std::make_unique<Implementation>();
  if (Status status = made->mapped.open(path); !status.ok()) return status;
  const Memory& memory = made->mapped.memory();
  if (Status status = made->read(memory.data, static_cast<size_t>(memory.bytes)); !status.ok()) {
    return status.with_prefix((path + ": ").c_str());
  }
  tokenizer->reset(new Tokenizer(std::move(made)));
  return {};
} catch (const std::bad_alloc&) {
  return Status::no_memory("no memory for %s", given.c_str());
}

Status Tokenizer::read(const void* bytes, size_t size, std::unique_ptr<Tokenizer>* tokenizer) try {
  auto made = std::make_unique<Implementation>();
  made->copied.resize(size / 8 + 1);
  std::memcpy(made->copied.data(), bytes, size);
  if (Status status = made->read(made->copied.data(), size); !status.ok()) return status;
  tokenizer->reset(new Tokenizer(std::move(made)));
  return {};
} catch (const std::bad_alloc&) {
  return Status::no_memory("no memory for a tokenizer of %zu bytes", size);
}

Status Tokenizer::encode(std::string_view text, bool special, std::vector<int64_t>* tokens) const try {
  const Implementation& made = *implementation_;
  *tokens = special ? made.before : std::vector<int64_t>();
  if (Status status = made.encode(text, nullptr, tokens); !status.ok()) return status;
  if (special) tokens->insert(tokens->end(), made.after.begin(), made.after.end());
  return {};
} catch (const std::bad_alloc&) {
  return Status::no_memory("no memory for a text of %zu bytes", text.size());
}

Status Tokenizer::decode(const std::vector<int64_t>& tokens, bool plain, std::string* text) const try {
  const Implementation& made = *implementation_;
  std::vector<std::string> texts;
  size_t bytes = 0;
  for (const int64_t token : tokens) {
    if (token < 0 || token >= made.size) continue;  // models may have more tokens than their tokenizers
    const auto number = static_cast<uint32_t>(token);
    const auto shown = made.shown.find(number);
    const std::string_view each = made.file.text(shown != made.shown.end() ? shown->second : number);
    if (each.empty() || (plain && made.special[static_cast<size_t>(token)])) continue;
    texts.emplace_back(each);
    bytes += each.size();
  }
  Matcher matcher(made.file, bytes);
  return made.steps.decode(matcher, std::move(texts), text);
} catch (const std::bad_alloc&) {
  return Status::no_memory("no memory for the text of %zu tokens", tokens.size());
}

Status Tokenizer::chat_text(const Conversation& conversation, std::string* text) const try {
  std::vector<std::pair<std::string, bool>> parts;
  text->clear();
  if (Status status = implementation_->render(conversation, &parts); !status.ok()) return status;
  for (const auto& part : parts) *text += part.first;
  return {};
} catch (const std::bad_alloc&) {
  return Status::no_memory("no memory for a conversation");
}

Status Tokenizer::chat(const Conversation& conversation, std::vector<int64_t>* tokens) const try {
  const Implementation& made = *implementation_;
  std::vector<std::pair<std::string, bool>> parts;
  if (Status status = made.render(conversation, &parts); !status.ok()) return status;
  std::string text;
  std::vector<Range> places, everywhere;
  const auto find = [&](std::string_view part, size_t shift, std::vector<Range>* found) {
    for (size_t at = 0; at < part.size();) {
      const Added* const token = made.control.longest(part, at, [](const Added&, size_t) { return true; });
      if (token != nullptr) found->emplace_back(shift + at, shift + at + token->text.size());
      at += token != nullptr ? token->text.size() : 1;
    }
  };
  for (const auto& [part, by_template] : parts) {
    if (by_template) find(part, text.size(), &places);
    text += part;
  }
  find(text, 0, &everywhere);
  tokens->clear();
  return made.encode(text, places == everywhere ? nullptr : &places, tokens);
} catch (const std::bad_alloc&) {
  return Status::no_memory("no memory for a conversation");
}

Status TokenStream::push(int64_t token, std::string* text) try {
  const auto incomplete = [](const std::string& each) {
    return each.size() >= 3 && each.compare(each.size() - 3, 3, kReplacement) == 0;
  };
  if (prefix_.empty() && !tokens_.empty()) {
    std::string before;
    if (Status status = tokenizer_.decode(tokens_, true, &before); !status.ok()) return status;
    if (!incomplete(before)) prefix_ = before, prefix_tokens_ = tokens_.size();
  }
  tokens_.push_back(token);
  std::string all;
  if (Status status = tokenizer_.decode(tokens_, true, &all); !status.ok()) return status;
  if (all.size() <= prefix_.size() || incomplete(all)) return {};
  if (all.compare(0, prefix_.size(), prefix_) != 0) {
    return Status::error("the text of the tokens changes with token %" PRId64 "; expected it to grow", token);
  }
  text->append(all, prefix_.size(), std::string::npos);
  const size_t kept = tokens_.size() - prefix_tokens_;
  tokens_.erase(tokens_.begin(), tokens_.begin() + static_cast<ptrdiff_t>(prefix_tokens_));
  prefix_tokens_ = kept;
  return tokenizer_.decode(tokens_, true, &prefix_);
} catch (const std::bad_alloc&) {
  return Status::no_memory("no memory for a text");
}

}  // namespace lowbit

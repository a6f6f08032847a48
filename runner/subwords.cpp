#include "subwords.h"

#include <algorithm>
#include <queue>

#include "utf8.h"

namespace lowbit::text {
namespace {

constexpr uint32_t kFirst = 0x180;  // covers the letters that stand for bytes

}  // namespace

Status Subwords::read(Head& head) {
  const uint32_t most = file_.text_count - 1;
  kind_ = static_cast<SubwordKind>(head.number("the kind of the model", 0, static_cast<uint32_t>(SubwordKind::count) - 1));
  unknown_ = head.or_none("the unknown token", file_.text_count);
  prefix_ = file_.text(head.text("the prefix"));
  suffix_ = file_.text(head.text("the suffix"));
  fuses_unknown_ = head.number("fuse_unk", 0, 1) != 0;
  takes_whole_ = head.number("ignore_merges", 0, 1) != 0;
  most_characters_ = head.number("the length of a word", 0, kNone);
  const uint32_t bytes = head.number("the number of byte tokens", 0, 256);
  for (uint32_t i = 0; i < bytes; ++i) bytes_.push_back(head.or_none("a byte's token", most + 1));
  if (!head.status().ok()) return head.status();
  if (bytes != 0 && bytes != 256) return Status::error("the tokens file has %u tokens of bytes; expected 0 or 256", bytes);
  if (kind_ == SubwordKind::unigram) {
    if (file_.scores.size < file_.order.size) return Status::error("the tokens file has fewer scores than tokens");
    double least = 0.0;
    for (const uint32_t token : file_.order) {
      if (token >= file_.scores.size) return Status::error("the tokens file has no score for token %u", token);
      least = token == file_.order[0] ? file_.scores[token] : std::min(least, file_.scores[token]);
    }
    unknown_score_ = least - 10.0;
  }
  for (uint32_t i = 0; i < kFirst && kind_ == SubwordKind::bpe; ++i) {
    std::string text;
    append_character(i, &text);
    characters_.push_back(find(text));
  }
  return {};
}

uint32_t Subwords::find(std::string_view text) const {
  const auto found = std::lower_bound(file_.order.begin(), file_.order.end(), text,
                                      [&](uint32_t token, std::string_view wanted) { return file_.text(token) < wanted; });
  return found != file_.order.end() && file_.text(*found) == text ? *found : kNone;
}

const Merge* Subwords::merge_of(uint32_t left, uint32_t right) const {
  const auto found = std::lower_bound(file_.merges.begin(), file_.merges.end(), Merge{left, right, 0, 0},
                                      [](const Merge& a, const Merge& b) {
                                        return a.left != b.left ? a.left < b.left : a.right < b.right;
                                      });
  return found != file_.merges.end() && found->left == left && found->right == right ? found : nullptr;
}

void Subwords::encode(std::string_view piece, const std::vector<bool>* forbidden, std::vector<uint32_t>* ids) const {
  switch (kind_) {
    case SubwordKind::bpe: return bpe(piece, forbidden, ids);
    case SubwordKind::unigram: return unigram(piece, forbidden, ids);
    case SubwordKind::word_piece: return word_piece(piece, ids);
    default:
      if (const uint32_t token = find(piece); token != kNone || unknown_ != kNone) {
        ids->push_back(token != kNone ? token : unknown_);
      }
  }
}

// The tokens of all bytes of a text; false: a byte has no token.
bool Subwords::bytes_of(std::string_view text, std::vector<uint32_t>* ids) const {
  if (bytes_.empty()) return false;
  for (const char each : text) {
    if (bytes_[static_cast<uint8_t>(each)] == kNone) return false;
  }
  for (const char each : text) ids->push_back(bytes_[static_cast<uint8_t>(each)]);
  return true;
}

void Subwords::bpe(std::string_view piece, const std::vector<bool>* forbidden, std::vector<uint32_t>* ids) const {
  const auto allowed = [&](uint32_t token) { return forbidden == nullptr || !(*forbidden)[token]; };
  if (takes_whole_) {
    if (const uint32_t token = find(piece); token != kNone && allowed(token)) {
      ids->push_back(token);
      return;
    }
  }
  std::vector<uint32_t> tokens;
  bool pending = false;  // the last token is unknown, and may absorb the next character
  std::string part;
  for (size_t at = 0, length; at < piece.size(); at += length) {
    uint32_t character;
    length = character_at(piece, at, &character);
    part.clear();
    if (at > 0) part += prefix_;
    part.append(piece, at, length);
    if (at + length == piece.size()) part += suffix_;
    const bool alone = part.size() == length && character < kFirst;
    if (const uint32_t token = alone ? characters_[character] : find(part); token != kNone && allowed(token)) {
      if (pending) tokens.push_back(unknown_);
      pending = false;
      tokens.push_back(token);
    } else if (!bytes_of(part, &tokens) && unknown_ != kNone) {
      if (pending && !fuses_unknown_) tokens.push_back(unknown_);
      pending = true;
    }
  }
  if (pending) tokens.push_back(unknown_);
  std::vector<Symbol> symbols;
  const int32_t count = static_cast<int32_t>(tokens.size());
  for (int32_t i = 0; i < count; ++i) {
    symbols.push_back({tokens[static_cast<size_t>(i)], i - 1, i + 1 < count ? i + 1 : -1, false});
  }
  merge(symbols, forbidden);
  for (const Symbol& each : symbols) {
    if (!each.merged) ids->push_back(each.token);
  }
}

// Joins neighbors: first the merge of the least rank, and among equal ranks the first in the text.
void Subwords::merge(std::vector<Symbol>& symbols, const std::vector<bool>* forbidden) const {
  struct Candidate {
    uint32_t rank;
    int32_t at;
    uint32_t token;
    bool operator<(const Candidate& other) const { return rank != other.rank ? rank > other.rank : at > other.at; }
  };
  std::vector<Candidate> all;
  const auto candidate = [&](int32_t at, Candidate* made) {
    if (at < 0 || symbols[static_cast<size_t>(at)].after < 0) return false;
    const Symbol& left = symbols[static_cast<size_t>(at)];
    const Merge* const found = merge_of(left.token, symbols[static_cast<size_t>(left.after)].token);
    if (found == nullptr || (forbidden != nullptr && (*forbidden)[found->token])) return false;
    *made = {found->rank, at, found->token};
    return true;
  };
  Candidate made;
  for (int32_t i = 0; i < static_cast<int32_t>(symbols.size()); ++i) {
    if (candidate(i, &made)) all.push_back(made);
  }
  std::priority_queue<Candidate> queue({}, std::move(all));
  while (!queue.empty()) {
    const Candidate top = queue.top();
    queue.pop();
    Symbol& left = symbols[static_cast<size_t>(top.at)];
    if (left.merged || !candidate(top.at, &made) || made.token != top.token) continue;
    Symbol& right = symbols[static_cast<size_t>(left.after)];
    right.merged = true;
    left.token = top.token;
    left.after = right.after;
    if (left.after >= 0) symbols[static_cast<size_t>(left.after)].before = top.at;
    if (candidate(left.before, &made)) queue.push(made);
    if (candidate(top.at, &made)) queue.push(made);
  }
}

// The most likely tokens (Viterbi). Characters that no token covers become the unknown token.
void Subwords::unigram(std::string_view piece, const std::vector<bool>* forbidden, std::vector<uint32_t>* ids) const {
  struct Best {
    double score = 0.0;
    size_t from = 0;
    uint32_t token = kNone;
    bool reached = false;
  };
  std::vector<Best> best(piece.size() + 1);
  best[0].reached = true;
  for (size_t at = 0, length; at < piece.size(); at += length) {
    length = character_length(piece, at);
    const auto offer = [&](size_t end, uint32_t token, double score) {
      if (const double sum = best[at].score + score; !best[end].reached || sum > best[end].score) {
        best[end] = {sum, at, token, true};
      }
    };
    bool whole = false;  // a token covers exactly this character
    auto low = file_.order.begin(), high = file_.order.end();
    for (size_t end = at + 1; end <= piece.size() && low != high; ++end) {
      const std::string_view wanted = piece.substr(at, end - at);
      low = std::partition_point(low, high, [&](uint32_t token) { return file_.text(token) < wanted; });
      high = std::partition_point(low, high, [&](uint32_t token) {
        return file_.text(token).substr(0, wanted.size()) == wanted;
      });
      if (low == high || file_.text(*low) != wanted || (forbidden != nullptr && (*forbidden)[*low])) continue;
      offer(end, *low, file_.scores[*low]);
      whole = whole || end == at + length;
    }
    if (!whole && unknown_ != kNone) offer(at + length, unknown_, unknown_score_);
    if (!best[at + length].reached) return;  // no tokens reach this place, and there is no unknown token
  }
  std::vector<std::pair<std::string_view, bool>> parts;  // text, and whether it is unknown
  for (size_t end = piece.size(); end > 0; end = best[end].from) {
    const std::string_view part = piece.substr(best[end].from, end - best[end].from);
    const bool unknown = best[end].token == unknown_;
    if (unknown && fuses_unknown_ && !parts.empty() && parts.back().second) {
      parts.back().first = {part.data(), part.size() + parts.back().first.size()};
    } else {
      parts.emplace_back(part, unknown);
    }
  }
  for (auto part = parts.rbegin(); part != parts.rend(); ++part) {
    const uint32_t token = find(part->first);
    if (token != kNone && (forbidden == nullptr || !(*forbidden)[token])) {
      ids->push_back(token);
    } else if (!bytes_of(part->first, ids) && unknown_ != kNone) {
      ids->push_back(unknown_);
    }
  }
}

// Takes the longest token each time; if no token fits the rest of a word, the whole word is unknown.
void Subwords::word_piece(std::string_view piece, std::vector<uint32_t>* ids) const {
  size_t count = 0;
  for (size_t at = 0; at < piece.size(); at += character_length(piece, at)) ++count;
  std::vector<uint32_t> parts;
  for (size_t at = 0; count <= most_characters_ && at < piece.size();) {
    size_t end = piece.size();
    uint32_t token = kNone;
    for (; end > at; end = character_before(piece, end)) {
      token = find(std::string(at > 0 ? prefix_ : "").append(piece, at, end - at));
      if (token != kNone) break;
    }
    if (token == kNone) count = most_characters_ + size_t{1};
    parts.push_back(token);
    at = end;
  }
  if (count <= most_characters_) {
    ids->insert(ids->end(), parts.begin(), parts.end());
  } else if (unknown_ != kNone) {
    ids->push_back(unknown_);
  }
}

}  // namespace lowbit::text

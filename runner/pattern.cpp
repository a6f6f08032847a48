#include "pattern.h"

#include "utf8.h"

namespace lowbit::text {
namespace {

constexpr int kMostDepth = 8;  // nesting of patterns
constexpr size_t kMostChoices = size_t{1} << 24;
constexpr size_t kNowhere = static_cast<size_t>(-1);

}  // namespace

Status Matcher::status() const {
  return left_ != 0 ? Status() : Status::error("the tokenizer's pattern takes too many steps for this text");
}

bool Matcher::find(uint32_t start, std::string_view text, size_t from, size_t* begin, size_t* end) {
  for (size_t place = from; place < text.size(); place += character_length(text, place)) {
    const size_t found = run(start, text, place, 0);
    if (left_ == 0) return false;
    if (found != kNowhere && found > place) {
      *begin = place, *end = found;
      return true;
    }
  }
  return false;
}

// The end of a match that begins at `place`; kNowhere: there is no match.
size_t Matcher::run(uint32_t at, std::string_view text, size_t place, int depth) {
  const size_t bottom = choices_.size();
  uint32_t character = 0;
  for (;;) {
    if (choices_.size() > kMostChoices) left_ = 0;
    if (!spend(1)) break;
    const PatternStep& now = file_.code[at];
    bool fits = true;
    switch (static_cast<PatternOp>(now.op)) {
      case PatternOp::match: choices_.resize(bottom); return place;
      case PatternOp::one:
        fits = place < text.size();
        if (fits) {
          const size_t length = character_at(text, place, &character);
          fits = file_.classes[now.a].has(character);
          place += length;
        }
        break;
      case PatternOp::greedy:
      case PatternOp::possessive: {
        uint32_t count = 0;
        size_t least = place;
        while (count < now.c && place < text.size()) {
          const size_t length = character_at(text, place, &character);
          if (!file_.classes[now.a].has(character)) break;
          place += length;
          if (++count <= now.b) least = place;
        }
        fits = count >= now.b && spend(count);
        if (fits && place > least && static_cast<PatternOp>(now.op) == PatternOp::greedy) {
          choices_.push_back({at + 1, place, least});
        }
        break;
      }
      case PatternOp::either:
        choices_.push_back({now.b, place, kOnce});
        at = now.a;
        continue;
      case PatternOp::jump: at = now.a; continue;
      case PatternOp::ahead:
      case PatternOp::not_ahead:
        if (depth == kMostDepth) left_ = 0;
        fits = left_ != 0 && (run(at + 1, text, place, depth + 1) != kNowhere) ==
                                 (static_cast<PatternOp>(now.op) == PatternOp::ahead);
        if (fits) {
          at = now.a;
          continue;
        }
        break;
      case PatternOp::behind:
      case PatternOp::not_behind: {
        bool before = place > 0;
        if (before) {
          character_at(text, character_before(text, place), &character);
          before = file_.classes[now.a].has(character);
        }
        fits = before == (static_cast<PatternOp>(now.op) == PatternOp::behind);
        break;
      }
      case PatternOp::line_end: fits = place == text.size() || text[place] == '\n'; break;
      case PatternOp::count: break;
    }
    if (fits) {
      ++at;
      continue;
    }
    if (choices_.size() == bottom) return kNowhere;
    Choice& last = choices_.back();
    at = last.at;
    if (last.least == kOnce) {
      place = last.place;
      choices_.pop_back();
    } else {
      place = last.place = character_before(text, last.place);
      if (place == last.least) choices_.pop_back();
    }
  }
  choices_.resize(bottom);
  return kNowhere;
}

}  // namespace lowbit::text

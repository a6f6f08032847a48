#include "chat_pieces.h"

#include <ctime>

#include "utf8.h"

namespace lowbit::text {

Status ChatPieces::read(Head& head) {
  space_ = head.or_none("the class of spaces", static_cast<uint32_t>(file_.classes.size()));
  for (Form& form : forms_) {
    form.refusal = head.or_none("a refusal", file_.text_count);
    if (form.refusal != kNone) continue;
    for (Piece* const piece : {&form.before_system, &form.before_user, &form.before_answer, &form.after_answer, &form.end}) {
      const uint32_t count = head.number("the number of parts", 0, 64);
      for (uint32_t i = 0; i < count; ++i) {
        const bool date = head.number("the kind of a part", 0, 1) != 0;
        piece->push_back({date, head.text("a part")});
      }
    }
    for (Change* const change : {&form.system, &form.user, &form.answer}) {
      *change = static_cast<Change>(head.number("a change", 0, static_cast<uint32_t>(Change::count) - 1));
      if (*change != Change::none && space_ == kNone) return Status::error("the tokens' file has no class of spaces");
    }
  }
  return head.status();
}

void ChatPieces::add(const Piece& piece, std::vector<std::pair<std::string, bool>>* parts) const {
  std::string text;
  for (const Part& part : piece) {
    std::string content(file_.text(part.text));
    if (part.date) {
      const std::time_t now = std::time(nullptr);
      std::tm local{};
#ifdef _WIN32
      localtime_s(&local, &now);
#else
      localtime_r(&now, &local);
#endif
      char written[256];
      content.assign(written, std::strftime(written, sizeof written, content.c_str(), &local));
    }
    text += content;
  }
  parts->emplace_back(std::move(text), true);
}

std::string ChatPieces::changed(const std::string& text, Change change) const {
  size_t begin = 0, end = text.size();
  uint32_t character;
  if (change == Change::after_thinking) {
    constexpr char kEnd[] = "</think>";
    if (const size_t at = text.rfind(kEnd); at != std::string::npos) begin = at + sizeof kEnd - 1;
    while (begin < end && text[begin] == '\n') ++begin;
    return text.substr(begin);
  }
  while ((change == Change::strip || change == Change::strip_left) && begin < end) {
    const size_t length = character_at(text, begin, &character);
    if (!file_.classes[space_].has(character)) break;
    begin += length;
  }
  while ((change == Change::strip || change == Change::strip_right) && begin < end) {
    const size_t before = character_before(text, end);
    character_at(text, before, &character);
    if (!file_.classes[space_].has(character)) break;
    end = before;
  }
  return text.substr(begin, end - begin);
}

Status ChatPieces::render(const Conversation& conversation, std::vector<std::pair<std::string, bool>>* parts) const {
  const Form& form = forms_[conversation.has_system];
  if (form.refusal != kNone) return Status::error("%s", std::string(file_.text(form.refusal)).c_str());
  if (conversation.messages.size() % 2 == 0) {
    return Status::error("the conversation has %zu messages; expected the user's and answers in turn, the user's last",
                         conversation.messages.size());
  }
  if (conversation.has_system) {
    add(form.before_system, parts);
    parts->emplace_back(changed(conversation.system, form.system), false);
    if (parts->back().first.empty()) return Status::error("the system prompt is empty; expected text, or no system prompt");
  }
  for (size_t i = 0; i < conversation.messages.size(); ++i) {
    add(i == 0 ? form.before_user : i % 2 == 0 ? form.after_answer : form.before_answer, parts);
    parts->emplace_back(changed(conversation.messages[i], i % 2 == 0 ? form.user : form.answer), false);
  }
  add(form.end, parts);
  return {};
}

}  // namespace lowbit::text

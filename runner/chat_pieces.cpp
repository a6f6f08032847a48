#include "chat_pieces.h"

#include <cinttypes>
#include <ctime>

#include "utf8.h"

namespace lowbit::text {
namespace {

// Numbers of changes from here on have, in the bits above, the change of the user's later messages plus 1.
constexpr uint32_t kLater = 1 << 16;
constexpr uint32_t kAfterThinking = 5 + 8 + 32 * 5;  // files may write this change as 4, too

}  // namespace

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
      const uint32_t number = head.number("a change", 0, kNone);
      if (Status status = read(number % kLater, change); !status.ok()) return status;
      if (change != &form.user) continue;
      form.later = form.user;
      if (number < kLater) continue;
      if (Status status = read(number / kLater - 1, &form.later); !status.ok()) return status;
    }
  }
  return head.status();
}

Status ChatPieces::read(uint32_t number, Change* change) const {
  if (number == 4) number = kAfterThinking;
  *change = {static_cast<Strip>(number % 8), static_cast<Cut>(number / 8 % 4), static_cast<Strip>(number / 32 % 8),
             number / 256 == 1};
  const auto known = [](Strip strip) { return strip != Strip::unused && strip < Strip::count; };
  if (!known(change->strip) || !known(change->strip_cut) || change->cut >= Cut::count || number >= 512) {
    return Status::error("the tokens file has the change %" PRIu32 " of messages, which is not known", number);
  }
  return space_ != kNone || number == 0 ? Status() : Status::error("the tokens file has no class of spaces");
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

Status ChatPieces::add(const std::string& text, const Change& change, std::vector<std::pair<std::string, bool>>* parts) const {
  size_t begin = 0, end = text.size();
  Strip strip = change.strip;
  constexpr char kEnd[] = "</think>";
  const size_t at = change.cut == Cut::after_first ? text.find(kEnd) : text.rfind(kEnd);
  if (change.cut != Cut::none && at != std::string::npos) begin = at + sizeof kEnd - 1, strip = change.strip_cut;
  const auto stripped = [&](size_t place) {
    if (strip >= Strip::left_newlines) return text[place] == '\n';
    uint32_t character;
    character_at(text, place, &character);
    return file_.classes[space_].has(character);
  };
  if (strip != Strip::none && strip != Strip::right) {
    while (begin < end && stripped(begin)) begin += character_length(text, begin);
  }
  if (strip == Strip::both || strip == Strip::right || strip == Strip::newlines) {
    for (size_t before; begin < end && stripped(before = character_before(text, end));) end = before;
  }
  if (begin == end && change.not_empty) return Status::error("a message is empty; expected text, for this chat template");
  parts->emplace_back(text.substr(begin, end - begin), false);
  return {};
}

Status ChatPieces::render(const Conversation& conversation, std::vector<std::pair<std::string, bool>>* parts) const {
  const Form& form = forms_[conversation.has_system];
  if (form.refusal != kNone) return Status::error("%s", std::string(file_.text(form.refusal)).c_str());
  if (conversation.messages.size() % 2 == 0) {
    return Status::error("the conversation has %zu messages; expected an odd number: messages of the user and "
                         "answers in turn",
                         conversation.messages.size());
  }
  if (conversation.has_system) {
    add(form.before_system, parts);
    if (Status status = add(conversation.system, form.system, parts); !status.ok()) return status;
    if (parts->back().first.empty()) return Status::error("the system prompt is empty; expected text, or no system prompt");
  }
  for (size_t i = 0; i < conversation.messages.size(); ++i) {
    add(i == 0 ? form.before_user : i % 2 == 0 ? form.after_answer : form.before_answer, parts);
    const Change& change = i == 0 ? form.user : i % 2 == 0 ? form.later : form.answer;
    if (Status status = add(conversation.messages[i], change, parts); !status.ok()) return status;
  }
  add(form.end, parts);
  return {};
}

}  // namespace lowbit::text

// A chat template as pieces of text between the messages of a conversation.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "tokenizer.h"
#include "tokens_file.h"

namespace lowbit::text {

class ChatPieces {
 public:
  explicit ChatPieces(const TokensFile& file) : file_(file) {}

  Status read(Head& head);
  // The texts of a conversation in order, and for each whether the template has written it.
  Status render(const Conversation& conversation, std::vector<std::pair<std::string, bool>>* parts) const;

 private:
  enum class Change : uint32_t { none, strip, strip_left, strip_right, after_thinking, count };
  struct Part {
    bool date;  // a format of strftime, else text
    uint32_t text;
  };
  using Piece = std::vector<Part>;
  struct Form {
    uint32_t refusal = kNone;  // text: why there is none
    Piece before_system, before_user, before_answer, after_answer, end;
    Change system = Change::none, user = Change::none, answer = Change::none;
  };

  void add(const Piece& piece, std::vector<std::pair<std::string, bool>>* parts) const;
  std::string changed(const std::string& text, Change change) const;

  const TokensFile& file_;
  Form forms_[2];  // without and with a system prompt
  uint32_t space_ = kNone;
};

}  // namespace lowbit::text

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
  // The texts of a conversation in order, and whether each comes from the template rather than from a message.
  Status render(const Conversation& conversation, std::vector<std::pair<std::string, bool>>* parts) const;

 private:
  enum class Strip : uint32_t { none, both, left, right, unused, left_newlines, newlines, count };
  // Keeps only the text after the last, or the first, </think>.
  enum class Cut : uint32_t { none, after_last, after_first, count };
  struct Change {
    Strip strip = Strip::none;
    Cut cut = Cut::none;
    Strip strip_cut = Strip::none;  // replaces `strip` in a message that was cut
    bool not_empty = false;         // an empty message is refused, because the template would treat it differently
  };
  struct Part {
    bool date;  // whether the text is a format of strftime
    uint32_t text;
  };
  using Piece = std::vector<Part>;
  struct Form {
    uint32_t refusal = kNone;  // text: why such conversations are not supported
    Piece before_system, before_user, before_answer, after_answer, end;
    Change system, user, answer, later;  // user: the first message; later: the others of the user
  };

  void add(const Piece& piece, std::vector<std::pair<std::string, bool>>* parts) const;
  Status read(uint32_t number, Change* change) const;
  Status add(const std::string& text, const Change& change, std::vector<std::pair<std::string, bool>>* parts) const;

  const TokensFile& file_;
  Form forms_[2];  // without and with a system prompt
  uint32_t space_ = kNone;
};

}  // namespace lowbit::text

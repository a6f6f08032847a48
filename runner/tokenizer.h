// Converts texts and conversations to tokens and back without Python: the same tokens as the library `tokenizers`.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "../kernels/export.h"
#include "../kernels/status.h"

namespace lowbit {

// Settings of the model that the tokens file has in addition to the tokens.
struct TextSettings {
  std::vector<int64_t> stop;             // tokens that end a text
  int keys = 0, values = 0;              // TextCache of plan/model.h, by default
  double temperature = 0.0, top_p = 1.0, min_p = 0.0, repetition_penalty = 1.0;  // for conversations
  int64_t top_k = 0;                     // 0: all tokens
  int64_t max_new_tokens = 0;            // 0: not set
  uint32_t plan = 0;                     // the last bytes of the plan's file, its checksum; 0: any plan
};

// A token that is searched in a text before the text is normalized and split.
struct AddedToken {
  int64_t token;
  std::string text, shown;  // shown: the text to which it is decoded
  bool special;
};

// A conversation: user, assistant, user, ... The last message is the user's.
struct Conversation {
  bool has_system = false;
  std::string system;
  std::vector<std::string> messages;
};

class LOWBIT_API Tokenizer {
 public:
  // Opens a tokens file, or lowbit.tokens in a directory.
  static Status open(const std::string& path, std::unique_ptr<Tokenizer>* tokenizer);
  // Copies the bytes of a file, which need not be trusted.
  static Status read(const void* bytes, size_t size, std::unique_ptr<Tokenizer>* tokenizer);
  ~Tokenizer();
  Tokenizer(const Tokenizer&) = delete;
  Tokenizer& operator=(const Tokenizer&) = delete;

  int64_t size() const;  // token ids are smaller
  const TextSettings& settings() const;
  std::vector<AddedToken> added() const;
  // special: whether to add the tokens that the tokenizer puts around each text.
  Status encode(std::string_view text, bool special, std::vector<int64_t>* tokens) const;
  // The text of tokens, without special ones if `plain`.
  Status decode(const std::vector<int64_t>& tokens, bool plain, std::string* text) const;
  // The tokens of a conversation by the model's chat template, up to the answer. Messages never become control tokens.
  Status chat(const Conversation& conversation, std::vector<int64_t>* tokens) const;
  // The same as a text, for comparison.
  Status chat_text(const Conversation& conversation, std::string* text) const;

 private:
  struct Implementation;
  explicit Tokenizer(std::unique_ptr<Implementation> implementation);
  std::unique_ptr<Implementation> implementation_;
};

// Converts tokens to text one by one.
class LOWBIT_API TokenStream {
 public:
  // `prompt`: the tokens before, because some tokenizers drop the space before the first word of a text.
  TokenStream(const Tokenizer& tokenizer, std::vector<int64_t> prompt) : tokenizer_(tokenizer), tokens_(std::move(prompt)) {}
  // Appends the text that a token completes: nothing while a character is incomplete.
  Status push(int64_t token, std::string* text);

 private:
  const Tokenizer& tokenizer_;
  std::vector<int64_t> tokens_;
  std::string prefix_;
  size_t prefix_tokens_ = 0;
};

}  // namespace lowbit

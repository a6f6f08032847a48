// The tokenizer's functions of plan/lowbit.h.

#define LOWBIT_BUILDING
#include <algorithm>
#include <string>
#include <vector>

#include "../plan/c_handles.h"
#include "tokenizer.h"

namespace {

using lowbit::guarded;
using lowbit::missing;
using lowbit::not_open;
using lowbit::Status;
using lowbit::Tokenizer;

// Never destroyed, because other threads may use it while the process ends.
lowbit::Open<lowbit_tokenizer, Tokenizer>& tokenizers() {
  static auto& all = *new lowbit::Open<lowbit_tokenizer, Tokenizer>;
  return all;
}

// Copies a result to the caller's memory.
template <class List, class Item>
Status give(const Status& status, const List& list, Item* items, size_t most, size_t* count) {
  if (items != nullptr && status.ok()) std::copy_n(list.begin(), std::min(most, list.size()), items);
  *count = status.ok() ? list.size() : 0;
  return status;
}

}  // namespace

lowbit_result lowbit_tokenizer_open(const char* path, lowbit_tokenizer** tokenizer, lowbit_error* error) {
  return guarded(error, [&]() -> Status {
    if (path == nullptr) return missing("path");
    if (tokenizer == nullptr) return missing("tokenizer");
    *tokenizer = nullptr;
    std::unique_ptr<Tokenizer> made;
    const Status status = Tokenizer::open(path, &made);
    if (status.ok()) *tokenizer = tokenizers().add(std::move(made));
    return status;
  });
}

void lowbit_tokenizer_close(lowbit_tokenizer* tokenizer) { tokenizers().remove(tokenizer); }

lowbit_result lowbit_encode(const lowbit_tokenizer* tokenizer, const char* text, size_t bytes, int special, int64_t* tokens,
                            size_t most, size_t* count, lowbit_error* error) {
  return guarded(error, [&]() -> Status {
    const auto own = tokenizers().find(tokenizer);
    if (own == nullptr) return not_open("tokenizer", tokenizer);
    if (text == nullptr) return missing("text");
    if (count == nullptr) return missing("count");
    std::vector<int64_t> made;
    return give(own->encode({text, bytes}, special != 0, &made), made, tokens, most, count);
  });
}

lowbit_result lowbit_decode(const lowbit_tokenizer* tokenizer, const int64_t* tokens, size_t token_count, int plain, char* text,
                            size_t most, size_t* count, lowbit_error* error) {
  return guarded(error, [&]() -> Status {
    const auto own = tokenizers().find(tokenizer);
    if (own == nullptr) return not_open("tokenizer", tokenizer);
    if (tokens == nullptr) return missing("tokens");
    if (count == nullptr) return missing("count");
    std::string made;
    return give(own->decode({tokens, tokens + token_count}, plain != 0, &made), made, text, most, count);
  });
}

lowbit_result lowbit_chat(const lowbit_tokenizer* tokenizer, const char* system, const char* const* messages,
                          size_t message_count, int64_t* tokens, size_t most, size_t* count, lowbit_error* error) {
  return guarded(error, [&]() -> Status {
    const auto own = tokenizers().find(tokenizer);
    if (own == nullptr) return not_open("tokenizer", tokenizer);
    if (messages == nullptr) return missing("messages");
    if (count == nullptr) return missing("count");
    lowbit::Conversation conversation{system != nullptr, system != nullptr ? system : "", {}};
    for (size_t i = 0; i < message_count; ++i) {
      if (messages[i] == nullptr) return missing("a message");
      conversation.messages.emplace_back(messages[i]);
    }
    std::vector<int64_t> made;
    return give(own->chat(conversation, &made), made, tokens, most, count);
  });
}

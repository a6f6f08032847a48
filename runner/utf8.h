// Decodes and encodes UTF-8, including invalid bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace lowbit::text {

inline constexpr char kReplacement[] = "\xef\xbf\xbd";  // U+FFFD

// The length of the character at `at`. 0: the bytes there are invalid; the first `wrong` ones (at least 1) count as one error.
inline size_t character_at(std::string_view text, size_t at, uint32_t* character, size_t* wrong = nullptr) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  *character = 0xfffd;
  const uint32_t first = byte(at);
  if (first < 0x80) {
    *character = first;
    return 1;
  }
  const size_t length = first < 0xc2 ? 0 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : first < 0xf5 ? 4 : 0;
  if (wrong != nullptr) *wrong = 1;
  if (length == 0) return 0;
  uint32_t value = first & (0x7fu >> length);
  for (size_t i = 1; i < length; ++i) {
    if (at + i == text.size()) return 0;
    const uint32_t next = byte(at + i);
    // The range of the second byte excludes overlong forms, surrogates and code points beyond U+10FFFF.
    const uint32_t least = i > 1 ? 0x80 : first == 0xe0 ? 0xa0 : first == 0xf0 ? 0x90 : 0x80;
    const uint32_t most = i > 1 ? 0xbf : first == 0xed ? 0x9f : first == 0xf4 ? 0x8f : 0xbf;
    if (next < least || next > most) return 0;
    if (wrong != nullptr) *wrong = i + 1;
    value = value << 6 | (next & 0x3f);
  }
  *character = value;
  return length;
}

// The following functions need valid UTF-8.
inline size_t character_length(std::string_view text, size_t at) {
  const uint8_t first = static_cast<uint8_t>(text[at]);
  return first < 0x80 ? 1 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
}

inline size_t character_before(std::string_view text, size_t at) {
  do --at;
  while (at > 0 && (static_cast<uint8_t>(text[at]) & 0xc0) == 0x80);
  return at;
}

inline void append_character(uint32_t character, std::string* text) {
  const auto add = [&](uint32_t byte) { text->push_back(static_cast<char>(byte)); };
  const auto rest = [&](int shift) { add(0x80 | (character >> shift & 0x3f)); };
  if (character < 0x80) {
    add(character);
  } else if (character < 0x800) {
    add(0xc0 | character >> 6), rest(0);
  } else if (character < 0x10000) {
    add(0xe0 | character >> 12), rest(6), rest(0);
  } else {
    add(0xf0 | character >> 18), rest(12), rest(6), rest(0);
  }
}

// The position of the first invalid byte; the text's size if all of it is UTF-8.
inline size_t first_wrong(std::string_view text) {
  uint32_t character;
  size_t at = 0;
  while (at < text.size()) {
    const size_t length = character_at(text, at, &character);
    if (length == 0) break;
    at += length;
  }
  return at;
}

// Makes UTF-8 of any bytes: each longest start of an incomplete character becomes U+FFFD.
inline std::string repaired(std::string_view bytes) {
  std::string result;
  uint32_t character;
  for (size_t at = 0; at < bytes.size();) {
    size_t wrong = 1;
    const size_t length = character_at(bytes, at, &character, &wrong);
    if (length != 0) {
      result.append(bytes, at, length);
    } else {
      result += kReplacement;
    }
    at += length != 0 ? length : wrong;
  }
  return result;
}

}  // namespace lowbit::text

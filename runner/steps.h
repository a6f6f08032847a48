// Steps of a tokenizer before and after its model: normalizing, cutting into pieces, decoding.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "pattern.h"
#include "tokens_file.h"

namespace lowbit::text {

struct Piece {
  std::string text;
  bool first;  // begins where the whole text does
};

enum class StepOp : uint32_t {
  map,        // replaces characters by texts: map a of b entries
  normalize,  // Unicode's decompositions: map a of b entries; classes of marks: map c of d entries; e: 1 composes
  replace,    // pattern a by text b
  prepend,    // puts text a before a nonempty text; b: 1 unless it begins so, 2 the same at the whole text's begin
  strip,      // characters of class a; b: at the beginning, c: at the end
  bytes,      // each byte becomes the letter that stands for it
  split,      // pattern a; b: Behavior, c: 1 inverts
  surround,   // puts text b before and after each character of class a
  // A match of pattern a with at most kMostGrapheme bytes becomes the text of its shortest start in map b (c entries, from
  // characters) or map d (e entries, from texts). All other characters become their texts in map b.
  charsmap,
  count,
};

enum class Behavior : uint32_t { removed, isolated, with_previous, with_next, contiguous, count };

enum class DecodeOp : uint32_t {
  bytes,           // joins all tokens, and replaces letters by the bytes for which they stand
  byte_tokens,     // replaces tokens such as <0x0A> by their bytes
  fuse,            // all tokens become one
  replace,         // text a by text b in each token
  strip,           // up to b times text a from the beginning and c times from the end of each token
  word_piece,      // prefix a continues a word; b: 1 cleans up spaces before punctuation
  metaspace,       // text a is a space, and nothing in the first token if b is 1
  suffix,          // text a ends a word
  replace_pattern,  // pattern a by text b in each token
  ctc,             // drops tokens that repeat the one before, and texts a; c: 1 cleans up, and text b becomes a space
  count,
};

class Steps {
 public:
  explicit Steps(const TokensFile& file);

  Status read(Head& head);
  Status normalize(Matcher& matcher, std::string* text) const;
  Status cut(Matcher& matcher, std::vector<Piece>* pieces) const;
  Status decode(Matcher& matcher, std::vector<std::string> tokens, std::string* text) const;

 private:
  struct Step {
    uint32_t op, a, b, c, d, e;
  };
  Status read_list(Head& head, std::vector<Step>* steps, uint32_t kinds, const char* name);
  Status apply(const Step& step, Matcher& matcher, bool first, std::string* text) const;
  Status split(const Step& step, Matcher& matcher, const Piece& piece, std::vector<Piece>* pieces) const;
  Status replace(const Step& step, Matcher& matcher, std::string* text) const;
  void map(uint32_t at, uint32_t count, std::string_view text, std::string* result) const;
  void charsmap(const Step& step, Matcher& matcher, std::string* text) const;
  void compose(const Step& step, std::string* text) const;
  Status decode(const Step& step, Matcher& matcher, std::vector<std::string>* tokens) const;
  std::string from_byte_letters(const std::vector<std::string>& tokens) const;
  const Pair* entry(uint32_t at, uint32_t count, uint32_t character) const;

  const TokensFile& file_;
  std::vector<Step> normalizers_, cutters_, decoders_;
  bool decodes_ = false;
  std::array<std::string, 256> byte_letters_;
  std::array<int, 512> letter_bytes_;  // -1: the letter stands for no byte
};

}  // namespace lowbit::text

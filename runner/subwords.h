// Splits a piece of text into tokens: byte pair encoding, Unigram, WordPiece and whole words, as in the library `tokenizers`.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tokens_file.h"

namespace lowbit::text {

enum class SubwordKind : uint32_t { bpe, unigram, word_piece, word_level, count };

class Subwords {
 public:
  explicit Subwords(const TokensFile& file) : file_(file) {}

  Status read(Head& head);
  // Appends the tokens of a piece. `forbidden`: for each token, whether text must never become it; may be null.
  void encode(std::string_view piece, const std::vector<bool>* forbidden, std::vector<uint32_t>* ids) const;

 private:
  struct Symbol {
    uint32_t token;
    int32_t before, after;  // other symbols; -1: none
    bool merged;            // whether it was merged into the symbol before
  };

  uint32_t find(std::string_view text) const;  // kNone: there is no such token
  const Merge* merge_of(uint32_t left, uint32_t right) const;
  void bpe(std::string_view piece, const std::vector<bool>* forbidden, std::vector<uint32_t>* ids) const;
  void merge(std::vector<Symbol>& symbols, const std::vector<bool>* forbidden) const;
  void unigram(std::string_view piece, const std::vector<bool>* forbidden, std::vector<uint32_t>* ids) const;
  void word_piece(std::string_view piece, std::vector<uint32_t>* ids) const;
  bool bytes_of(std::string_view text, std::vector<uint32_t>* ids) const;

  const TokensFile& file_;
  SubwordKind kind_ = SubwordKind::bpe;
  uint32_t unknown_ = kNone, most_characters_ = 0;
  std::string prefix_, suffix_;
  bool fuses_unknown_ = false, takes_whole_ = false;
  double unknown_score_ = 0.0;
  std::vector<uint32_t> bytes_;      // the token of each byte; empty: there are none
  std::vector<uint32_t> characters_;  // the token of each of the first characters
};

}  // namespace lowbit::text

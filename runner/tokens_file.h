// The file lowbit.tokens: a tokenizer and a chat template as tables, written by lowbit.exports.token_file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "../kernels/status.h"

namespace lowbit::text {

inline constexpr uint32_t kNone = ~0u;

// A character class: ranges [begin, end) in ascending order.
struct CharacterClass {
  const uint32_t* ranges;
  uint32_t count;
  uint64_t ascii[2];
  bool has(uint32_t character) const;
};

// One step of a compiled pattern.
struct PatternStep {
  uint32_t op, a, b, c;
};

enum class PatternOp : uint32_t {
  match,       // the end
  one,         // a character of class a
  greedy,      // b to c characters of class a, as many as possible
  possessive,  // as greedy, without backtracking to fewer
  either,      // continues at a; if that fails, at b
  jump,        // continues at a
  ahead,       // lookahead: if the pattern up to the next match fits here, continues at a
  not_ahead,
  behind,  // the character before is of class a
  not_behind,
  line_end,
  count,
};

struct Merge {
  uint32_t left, right, rank, token;
};

struct Pair {
  uint32_t from, to;
};

struct Composition {
  uint32_t first, second, character, unused;
};

template <class T>
struct Table {
  const T* data = nullptr;
  size_t size = 0;
  const T* begin() const { return data; }
  const T* end() const { return data + size; }
  const T& operator[](size_t i) const { return data[i]; }
};

// Tables of a file, which must stay in memory. read() checks all numbers that are used as indices.
struct TokensFile {
  uint32_t text_count = 0;
  Table<uint32_t> ends;   // end of each text in `bytes`; the first texts are those of the tokens
  Table<char> bytes;
  Table<uint32_t> order;  // tokens that text may become, sorted by their texts
  Table<Merge> merges;    // sorted by left and right
  Table<double> scores;
  std::vector<CharacterClass> classes;
  Table<PatternStep> code;
  Table<Pair> maps;
  Table<Composition> compositions;
  Table<uint32_t> head;

  Status read(const void* data, size_t size);
  std::string_view text(uint32_t index) const {
    const uint32_t begin = index == 0 ? 0 : ends[index - 1];
    return {bytes.data + begin, ends[index] - begin};
  }
};

// Reads the numbers of the head in order. After an error it returns the least allowed number.
class Head {
 public:
  explicit Head(const TokensFile& file) : file_(file) {}
  uint32_t number(const char* name, uint32_t least, uint32_t most);  // from `least` to `most`
  uint32_t or_none(const char* name, uint32_t below);                // kNone, or a number below `below`
  uint32_t text(const char* name) { return number(name, 0, file_.text_count - 1); }
  double real(const char* name);
  Status status() const { return status_; }
  bool at_end() const { return at_ == file_.head.size; }

 private:
  uint32_t take();
  const TokensFile& file_;
  size_t at_ = 0;
  Status status_;
};

}  // namespace lowbit::text

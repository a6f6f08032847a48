// Compiled regular expressions over UTF-8, with backtracking as in Oniguruma.
#pragma once

#include <string_view>
#include <vector>

#include "tokens_file.h"

namespace lowbit::text {

class Matcher {
 public:
  // Gives up after a number of steps that grows with the bytes of the text.
  Matcher(const TokensFile& file, size_t bytes) : file_(file), left_((uint64_t{1} << 20) + 256 * uint64_t{bytes}) {}

  // Finds the first match at or after `from` of the pattern that begins at instruction `start`; false: there is none.
  bool find(uint32_t start, std::string_view text, size_t from, size_t* begin, size_t* end);
  Status status() const;  // an error if it gave up

 private:
  struct Choice {
    uint32_t at;   // instruction
    size_t place;  // in the text
    size_t least;  // a loop may also end at each character from `place` back to here; kOnce: only at `place`
  };
  static constexpr size_t kOnce = static_cast<size_t>(-1);

  size_t run(uint32_t at, std::string_view text, size_t place, int depth);
  bool spend(uint64_t steps) { return (left_ -= steps < left_ ? steps : left_) != 0; }

  const TokensFile& file_;
  std::vector<Choice> choices_;
  uint64_t left_;
};

}  // namespace lowbit::text

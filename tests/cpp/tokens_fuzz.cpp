// Reads tokens files with random damage and a right checksum, and runs them on texts. Each is refused with a sentence, or
// stays within its memory, so that AddressSanitizer detects any other access (`make fuzz-tokens`).
//
//   tokens_fuzz FILE [EXECUTIONS [SEED]]   FILE is a whole one

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>

#include "../../plan/plan.h"
#include "../../runner/tokenizer.h"
#include "support/random.h"

namespace lowbit::test {
namespace {

constexpr size_t kHeader = 24;  // before the bytes that the checksum is of

std::string damaged(std::string bytes, Random& random) {
  // Most tables are large, so half of the damage is near the ends, which have the directory and the settings.
  for (int64_t left = random.between(int64_t{1}, int64_t{4}); left > 0; --left) {
    const size_t size = bytes.size(), span = random.below(2) == 0 ? std::min<size_t>(size, 1024) : size;
    const size_t from = random.below(2) == 0 ? 0 : size - span;
    const size_t at = from + static_cast<size_t>(random.below(span));
    if (at < kHeader) continue;
    constexpr uint32_t kWords[] = {0, 1, 255, 0x7fffffff, 0xfffffffe, 0xffffffff};
    if (random.below(2) == 0 && at % 4 == 0 && at + 4 <= size) {
      std::memcpy(&bytes[at], &kWords[random.below(6)], 4);
    } else {
      bytes[at] = static_cast<char>(random.next());
    }
  }
  if (random.below(16) == 0) bytes.resize(kHeader + static_cast<size_t>(random.below(bytes.size() - kHeader)));
  const uint32_t sum = checksum(bytes.data() + kHeader, bytes.size() - kHeader);
  std::memcpy(&bytes[20], &sum, 4);
  return bytes;
}

std::string text_of(Random& random) {
  constexpr const char* kParts[] = {"Hello", " ", "\n", "\xc3\xa9", "e\xcc\x81", "\xed\x95\x9c", "123", "'s",
                                    "<|im_start|>", "</s>", "\xf0\x9f\x98\x80", "  ", "\xe2\x96\x81", "\xff", "ABC", "<0x0A>"};
  std::string text;
  for (int64_t left = random.between(int64_t{0}, int64_t{24}); left > 0; --left) text += kParts[random.below(16)];
  return text;
}

int run(const std::string& whole, int64_t executions, uint64_t seed) {
  int64_t refused = 0, encoded = 0;
  for (int64_t i = 0; i < executions; ++i) {
    Random random(seed * 1000003 + static_cast<uint64_t>(i));
    const std::string bytes = damaged(whole, random);
    std::unique_ptr<Tokenizer> made;
    const auto check = [&](const Status& status) {
      if (!status.ok() && status.message()[0] == '\0') std::abort();
      return status.ok();
    };
    if (!check(Tokenizer::read(bytes.data(), bytes.size(), &made))) {
      ++refused;
      continue;
    }
    std::vector<int64_t> tokens;
    std::string text;
    const std::string given = text_of(random);
    encoded += check(made->encode(given, true, &tokens));
    for (int64_t left = 8; left > 0; --left) tokens.push_back(random.between(int64_t{-1}, made->size()));
    check(made->decode(tokens, random.below(2) == 0, &text));
    TokenStream stream(*made, {});
    for (const int64_t token : tokens) check(stream.push(token, &text));
    check(made->chat({random.below(2) == 0, given, {text_of(random), "a", given}}, &tokens));
  }
  std::printf("%lld damaged files: %lld refused, %lld texts encoded\n", static_cast<long long>(executions),
              static_cast<long long>(refused), static_cast<long long>(encoded));
  return 0;
}

}  // namespace
}  // namespace lowbit::test

int main(int argc, char** argv) {
  std::ifstream file(argc > 1 ? argv[1] : "", std::ios::binary);
  const std::string whole{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  if (whole.size() < 1024) {
    std::fprintf(stderr, "usage: tokens_fuzz FILE [EXECUTIONS [SEED]], with a tokens file\n");
    return 2;
  }
  return lowbit::test::run(whole, argc > 2 ? std::atoll(argv[2]) : 10000, argc > 3 ? std::strtoull(argv[3], nullptr, 10) : 1);
}

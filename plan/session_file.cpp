// Texts in files: their tokens and caches, so that a program can continue them later.

#include <atomic>
#include <cerrno>
#include <cinttypes>
#include <cstring>
#include <utility>

#include "../ops/aligned_memory.h"
#include "file.h"
#include "plan.h"
#include "session.h"

namespace lowbit {
namespace {

// The file: this head, the tokens, the rows of each cache head by head, the states, and the checksum of all of it. Numbers are
// little endian.
struct Head {
  char magic[16] = "lowbit text 1\n\n";
  uint64_t digest;                        // identifies the model's plan
  int64_t keys, values, position, bytes;  // `bytes`: size of the whole file
};
static_assert(sizeof(Head) == 56);
constexpr int64_t kLongestFile = int64_t{1} << 40;

}  // namespace

Status PlanSession::save(const std::string& file) const {
  static std::atomic<int> files{0};
  const Implementation& own = *implementation_;
  try {
    const auto contents = own.contents(own.position());
    Head head{};
    head = {.digest = own.digest, .keys = static_cast<int64_t>(own.keys), .values = static_cast<int64_t>(own.values),
            .position = own.position(), .bytes = static_cast<int64_t>(sizeof head) + 8 * own.position() + 4};
    for (const auto& content : contents) head.bytes += content.parts * content.bytes;
    // Written under another name first, so that a full disk leaves the earlier file unchanged.
    const std::string part =
        file + "." + std::to_string(process_number()) + "-" + std::to_string(files.fetch_add(1)) + ".part";
    File to = open_file(part, "wb");
    if (!to) return Status::system("%s cannot be written: %s", file.c_str(), std::strerror(errno));
    uint32_t sum = 0;
    const auto write = [&](const void* data, int64_t bytes) {
      sum = checksum(data, static_cast<size_t>(bytes), sum);
      return std::fwrite(data, 1, static_cast<size_t>(bytes), to.get()) == static_cast<size_t>(bytes);
    };
    bool good = write(&head, sizeof head) && write(own.tokens.data(), 8 * own.position());
    for (const auto& content : contents) {
      for (int64_t i = 0; good && i < content.parts; ++i) good = write(content.data + i * content.step, content.bytes);
    }
    const uint32_t whole = sum;
    good = good && write(&whole, sizeof whole) && sync_file(to.get());
    int error = errno;
    to.reset();
    if (good && replace_file(part, file)) return {};
    if (good) error = errno;
    remove_file(part);
    return Status::system("%s cannot be written: %s", file.c_str(), std::strerror(error));
  } catch (const std::bad_alloc&) {
    return Status::no_memory("no memory to save a text of %" PRId64 " tokens", own.position());
  }
}

Status PlanSession::load(const std::string& file) {
  Implementation& own = *implementation_;
  try {
    const File from = open_file(file, "rb");
    if (!from) return Status::system("%s does not open: %s", file.c_str(), std::strerror(errno));
    const auto invalid = [&](const char* what) {
      return Status::error("%s %s; expected a text that lowbit saved", file.c_str(), what);
    };
    Head head{};
    if (std::fread(&head, 1, sizeof head, from.get()) != sizeof head) return invalid("is too short or cannot be read");
    if (std::memcmp(head.magic, Head{}.magic, sizeof head.magic) != 0) return invalid("begins with other bytes");
    if (head.digest != own.digest) {
      return Status::error("%s has a text of another model; expected one of the same plan", file.c_str());
    }
    if (head.keys != static_cast<int64_t>(own.keys) || head.values != static_cast<int64_t>(own.values)) {
      return Status::error("%s has caches of types %" PRId64 " and %" PRId64 "; expected those of the text, %d and %d",
                           file.c_str(), head.keys, head.values, static_cast<int>(own.keys), static_cast<int>(own.values));
    }
    if (head.position < 0 || head.position > own.length) {
      return Status::out_of_range("%s has a text of %" PRId64 " tokens; expected at most %" PRId64, file.c_str(), head.position,
                                  own.length);
    }
    const auto contents = own.contents(head.position);
    int64_t bytes = static_cast<int64_t>(sizeof head) + 8 * head.position + 4;
    for (const auto& content : contents) bytes += content.parts * content.bytes;
    if (head.bytes != bytes || bytes > kLongestFile) return invalid("has another length than its text");
    // The text changes only after the whole file was checked.
    const int64_t rest = bytes - static_cast<int64_t>(sizeof head);
    const std::unique_ptr<void, FreeAligned> memory(allocate_aligned(rest + 1));
    if (!memory) return Status::no_memory("no memory for the %" PRId64 " bytes of %s", rest, file.c_str());
    const char* at = static_cast<char*>(memory.get());
    if (std::fread(memory.get(), 1, static_cast<size_t>(rest) + 1, from.get()) != static_cast<size_t>(rest)) {
      return invalid("ends early, or has more bytes than its text");
    }
    uint32_t expected;
    std::memcpy(&expected, at + rest - 4, sizeof expected);
    if (checksum(at, static_cast<size_t>(rest - 4), checksum(&head, sizeof head)) != expected) {
      return invalid("has a checksum that does not fit its bytes");
    }
    std::vector<int64_t> tokens(static_cast<size_t>(head.position));
    if (!tokens.empty()) std::memcpy(tokens.data(), at, tokens.size() * 8);
    for (const int64_t token : tokens) {
      if (token < 0 || token >= own.vocabulary) return invalid("has tokens outside of the vocabulary");
    }
    at += 8 * head.position;
    own.tokens = std::move(tokens);
    for (const auto& content : contents) {
      for (int64_t i = 0; i < content.parts; ++i, at += content.bytes) {
        if (content.bytes > 0) std::memcpy(content.data + i * content.step, at, static_cast<size_t>(content.bytes));
      }
    }
    return {};
  } catch (const std::bad_alloc&) {
    return Status::no_memory("no memory to load %s", file.c_str());
  }
}

}  // namespace lowbit

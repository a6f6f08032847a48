// The result of a function that can refuse its input: empty, or one sentence that names what was found and what was expected.
// It is stored on the stack, so that no layer below the host framework allocates or throws.
#pragma once

#include <cstdarg>
#include <cstdio>

namespace lowbit {

class [[nodiscard]] Status {
 public:
  enum class Kind : unsigned char { ok, invalid, out_of_range, no_memory, system };

  Status() { message_[0] = '\0'; }

#ifdef __clang_analyzer__
  // Clang's analyzer does not analyze functions with "...", and would assume that an error may be empty.
  template <typename... Values>
  static Status error(const char*, Values...) { return Status(Kind::invalid); }
  template <typename... Values>
  static Status out_of_range(const char*, Values...) { return Status(Kind::out_of_range); }
  template <typename... Values>
  static Status no_memory(const char*, Values...) { return Status(Kind::no_memory); }
  template <typename... Values>
  static Status system(const char*, Values...) { return Status(Kind::system); }
#else
  // An invalid argument.
  [[gnu::format(printf, 1, 2)]] static Status error(const char* format, ...) {
    va_list args;
    va_start(args, format);
    const Status status(Kind::invalid, format, args);
    va_end(args);
    return status;
  }

  // An index out of range.
  [[gnu::format(printf, 1, 2)]] static Status out_of_range(const char* format, ...) {
    va_list args;
    va_start(args, format);
    const Status status(Kind::out_of_range, format, args);
    va_end(args);
    return status;
  }

  [[gnu::format(printf, 1, 2)]] static Status no_memory(const char* format, ...) {
    va_list args;
    va_start(args, format);
    const Status status(Kind::no_memory, format, args);
    va_end(args);
    return status;
  }

  // A failure of the operating system.
  [[gnu::format(printf, 1, 2)]] static Status system(const char* format, ...) {
    va_list args;
    va_start(args, format);
    const Status status(Kind::system, format, args);
    va_end(args);
    return status;
  }
#endif

  bool ok() const { return kind_ == Kind::ok; }
  Kind kind() const { return kind_; }
  const char* message() const { return message_; }

  // The same error with words before its sentence.
  Status with_prefix(const char* words) const {
    Status result = *this;
    std::snprintf(result.message_, sizeof result.message_, "%s%s", words, message_);
    return result;
  }

 private:
#ifdef __clang_analyzer__
  explicit Status(Kind kind) : kind_(kind) { message_[0] = '\0'; }
#else
  Status(Kind kind, const char* format, va_list args) : kind_(kind) {
    std::vsnprintf(message_, sizeof message_, format, args);
  }
#endif

  Kind kind_ = Kind::ok;
  char message_[319];
};

}  // namespace lowbit

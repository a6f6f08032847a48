// The result of anything that can refuse its input: empty, or one sentence that names what was found and what
// was expected. It lives on the stack, so that no layer below the host framework allocates or throws.
#pragma once

#include <cstdarg>
#include <cstdio>

namespace lowbit {

class [[nodiscard]] Status {
 public:
  enum class Kind : unsigned char { ok, invalid, out_of_range, no_memory, system };

  Status() { message_[0] = '\0'; }

  // An argument that cannot be used.
  [[gnu::format(printf, 1, 2)]] static Status error(const char* format, ...) {
    va_list args;
    va_start(args, format);
    const Status status(Kind::invalid, format, args);
    va_end(args);
    return status;
  }

  // An index beyond the end.
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

  // Something that the operating system refused.
  [[gnu::format(printf, 1, 2)]] static Status system(const char* format, ...) {
    va_list args;
    va_start(args, format);
    const Status status(Kind::system, format, args);
    va_end(args);
    return status;
  }

  bool ok() const { return kind_ == Kind::ok; }
  Kind kind() const { return kind_; }
  const char* message() const { return message_; }

 private:
  Status(Kind kind, const char* format, va_list args) : kind_(kind) {
    std::vsnprintf(message_, sizeof message_, format, args);
  }

  Kind kind_ = Kind::ok;
  char message_[319];
};

}  // namespace lowbit

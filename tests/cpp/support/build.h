// Facts about the tests' build. The values are in one small file, so that all others are compiled equally with and without
// sanitizers, and ccache compiles them once.
#pragma once

namespace lowbit::test {

extern const char* const kTestLibraries;  // build directory of tests/vendor, with a trailing "/"
extern const bool kSanitized;             // freed memory is returned later, and counted elsewhere

}  // namespace lowbit::test

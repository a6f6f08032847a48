// What the tests know of their build. Its values are in one small file, and all others are compiled alike in the plain
// build and in that with sanitizers: where there is ccache, once.
#pragma once

namespace lowbit::test {

extern const char* const kTestLibraries;  // the directory of what tests/vendor builds, with the "/" at its end
extern const bool kSanitized;             // memory is not given back at once, and counted elsewhere

}  // namespace lowbit::test

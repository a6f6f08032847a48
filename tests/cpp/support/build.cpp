#include "build.h"

namespace lowbit::test {

const char* const kTestLibraries = LOWBIT_TEST_LIBRARIES;
const bool kSanitized = LOWBIT_TEST_SANITIZED;

}  // namespace lowbit::test

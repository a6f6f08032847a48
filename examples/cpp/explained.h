// Shared by the runners on libtorch.
#pragma once

#include <c10/util/Exception.h>

#include <stdexcept>
#include <string>

// Returns the result of `work`; puts `what` before its errors, and removes libtorch's stack trace.
template <class Work>
auto explained(const std::string& what, const Work& work) {
  try {
    return work();
  } catch (const c10::Error& error) {
    throw std::runtime_error(what + ": " + error.what_without_backtrace());
  } catch (const std::exception& error) {
    throw std::runtime_error(what + ": " + error.what());
  }
}

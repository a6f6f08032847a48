// Shared by the functions of the C interface: handles, results, exceptions.
#pragma once

#include <cstdint>
#include <cstdio>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <new>

#include "../kernels/status.h"
#include "lowbit.h"

namespace lowbit {
namespace {

// A handle is a number, and no number is used twice. So a closed model or text is recognized, and a model or text that a call
// uses stays until the call returns.
template <class Handle, class Value>
class Open {
 public:
  Handle* add(std::shared_ptr<Value> value) {
    const std::lock_guard<std::mutex> lock(busy_);
    values_.emplace(last_ + 1, std::move(value));
    return reinterpret_cast<Handle*>(++last_);
  }
  std::shared_ptr<Value> find(const Handle* handle) {
    const std::lock_guard<std::mutex> lock(busy_);
    const auto found = values_.find(reinterpret_cast<uintptr_t>(handle));
    return found == values_.end() ? nullptr : found->second;
  }
  void remove(const Handle* handle) {
    std::shared_ptr<Value> value;  // destroyed after the lock is released
    const std::lock_guard<std::mutex> lock(busy_);
    const auto found = values_.find(reinterpret_cast<uintptr_t>(handle));
    if (found == values_.end()) return;
    value = std::move(found->second);
    values_.erase(found);
  }

 private:
  std::mutex busy_;
  std::map<uintptr_t, std::shared_ptr<Value>> values_;
  uintptr_t last_ = 0;
};

inline lowbit_result result_of(const Status& status, lowbit_error* error) {
  if (error != nullptr) std::snprintf(error->message, sizeof error->message, "%s", status.message());
  switch (status.kind()) {
    case Status::Kind::ok: return LOWBIT_OK;
    case Status::Kind::invalid: return LOWBIT_INVALID;
    case Status::Kind::out_of_range: return LOWBIT_OUT_OF_RANGE;
    case Status::Kind::no_memory: return LOWBIT_NO_MEMORY;
    case Status::Kind::system: return LOWBIT_SYSTEM;
  }
  return LOWBIT_INVALID;
}

// The result of a function that gives a Status, or of its exception.
template <class Function>
lowbit_result guarded(lowbit_error* error, Function&& function) noexcept {
  try {
    return result_of(function(), error);
  } catch (const std::bad_alloc&) {
    return result_of(Status::no_memory("no memory for the call"), error);
  } catch (const std::exception& exception) {
    return result_of(Status::system("the call failed: %s", exception.what()), error);
  } catch (...) {
    return result_of(Status::system("the call failed"), error);
  }
}

inline Status missing(const char* name) { return Status::error("%s is NULL; expected an address", name); }

inline Status not_open(const char* name, const void* handle) {
  return handle == nullptr ? missing(name) : Status::error("%s is not open; expected one that has not been closed", name);
}

}  // namespace
}  // namespace lowbit

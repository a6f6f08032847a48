#include "scratch.h"

#ifndef _WIN32
#include <pthread.h>

#include <atomic>
#include <new>

#include "first_glibc.h"

LOWBIT_FIRST_GLIBC(pthread_key_create);
LOWBIT_FIRST_GLIBC(pthread_key_delete);
LOWBIT_FIRST_GLIBC(pthread_getspecific);
LOWBIT_FIRST_GLIBC(pthread_setspecific);
#endif

namespace lowbit {

#ifdef _WIN32

KeptMemory* kept_memory() {
  static thread_local struct OfThread : KeptMemory {
    ~OfThread() { lent = true; }  // and stays so, for calls that come even later
  } of_thread;
  return &of_thread;
}

#else

namespace {

// No thread_local: where there is no memory for such a variable, or for what shall happen to it when its thread ends, C
// libraries end the process.
class Key {
 public:
  Key() : valid_(pthread_key_create(&key_, end_of_thread) == 0) {}
  // With the program, or with the library that closes: a thread that ends later would call what is gone.
  ~Key() {
    if (valid_.exchange(false)) pthread_key_delete(key_);
  }

  KeptMemory* value() const {
    if (!valid_.load(std::memory_order_relaxed)) return nullptr;
    if (void* const memory = pthread_getspecific(key_)) return static_cast<KeptMemory*>(memory);
    KeptMemory* const made = new (std::nothrow) KeptMemory;
    if (made == nullptr || pthread_setspecific(key_, made) == 0) return made;
    delete made;
    return nullptr;
  }

 private:
  static void end_of_thread(void* value) { delete static_cast<KeptMemory*>(value); }

  pthread_key_t key_;
  std::atomic<bool> valid_;
};

}  // namespace

KeptMemory* kept_memory() {
  static const Key key;
  return key.value();
}

#endif

}  // namespace lowbit

// The macOS functions that the library of the macOS wheel imports, for Linux on Arm: elf_of_macho.py. The symbols have macOS's
// leading underscore. Functions that are equal on both systems call Linux's function; others are implemented here.
// LOWBIT_TEST_MAC: the Mac whose features sysctlbyname() reports.
#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>

// Both systems pass arguments in registers, and pointers and 8-byte numbers on the stack, in the same way.
#define SAME(name) __asm__(".globl _" #name "\n.type _" #name ", %function\n_" #name ": b " #name);
SAME(_Unwind_Resume) SAME(_ZSt9terminatev) SAME(_ZdaPv) SAME(_ZdlPvm) SAME(_ZnamRKSt9nothrow_t) SAME(_ZnwmRKSt9nothrow_t)
SAME(__cxa_atexit) SAME(__cxa_begin_catch) SAME(__cxa_guard_abort) SAME(__cxa_guard_acquire) SAME(__cxa_guard_release)
SAME(__gxx_personality_v0) SAME(access) SAME(bzero) SAME(dlclose) SAME(dlerror) SAME(dlsym) SAME(free) SAME(frexpf)
SAME(getenv) SAME(ldexpf) SAME(memcpy) SAME(memset) SAME(memmove) SAME(posix_memalign) SAME(sched_yield) SAME(strchr)
SAME(strcmp) SAME(strlen) SAME(strncat) SAME(strncpy) SAME(strnlen) SAME(strtol)

#define MACOS(name) __asm__("_" #name)

extern "C" {

// An object of which only the address is used.
extern const char nothrow MACOS(_ZSt7nothrow);
const char nothrow = 0;

// All symbols are bound when the library is loaded.
[[noreturn]] void bind_later() __asm__("dyld_stub_binder");
void bind_later() { std::abort(); }

// Clang turns loops that repeat a value into calls of this function.
void repeat(void* to, const void* pattern, size_t size) MACOS(memset_pattern16);
void repeat(void* to, const void* pattern, size_t size) {
  for (size_t at = 0; at < size; at += 16) {
    std::memcpy(static_cast<char*>(to) + at, pattern, size - at < 16 ? size - at : 16);
  }
}

// Variable arguments: macOS passes all of them on the stack, eight bytes each, and its va_list is the address of the first.
// This equals Linux's va_list of a call without free registers.
struct LinuxArguments {
  void* stack;
  void* gr_top;
  void* vr_top;
  int gr_offset, vr_offset;
};

int print(char* text, size_t size, const char* format, void* arguments) MACOS(vsnprintf);
int print(char* text, size_t size, const char* format, void* arguments) {
  const LinuxArguments mine{arguments, nullptr, nullptr, 0, 0};
  va_list list;
  static_assert(sizeof list == sizeof mine);
  std::memcpy(static_cast<void*>(&list), &mine, sizeof mine);
  return std::vsnprintf(text, size, format, list);
}
__asm__(".globl _snprintf\n.type _snprintf, %function\n_snprintf: mov x3, sp\n\tb _vsnprintf");

// libc++'s std::mutex is macOS's pthread_mutex_t: 64 bytes that start with a signature.
struct Mutex {
  int64_t signature;
  std::atomic<int> locked;
};
void lock(Mutex* mutex) MACOS(_ZNSt3__15mutex4lockEv);
void lock(Mutex* mutex) {
  while (mutex->locked.exchange(1, std::memory_order_acquire) != 0) sched_yield();
}
void unlock(Mutex* mutex) MACOS(_ZNSt3__15mutex6unlockEv);
void unlock(Mutex* mutex) { mutex->locked.store(0, std::memory_order_release); }
void end_of_mutex(Mutex*) MACOS(_ZNSt3__15mutexD1Ev);
void end_of_mutex(Mutex*) {}

// A key has eight bytes on macOS and four on Linux.
int key_create(uint64_t* key, void (*end)(void*)) MACOS(pthread_key_create);
int key_create(uint64_t* key, void (*end)(void*)) {
  pthread_key_t mine;
  const int error = pthread_key_create(&mine, end);
  if (error == 0) *key = mine;
  return error;
}
int key_delete(uint64_t key) MACOS(pthread_key_delete);
int key_delete(uint64_t key) { return pthread_key_delete(static_cast<pthread_key_t>(key)); }
void* get_specific(uint64_t key) MACOS(pthread_getspecific);
void* get_specific(uint64_t key) { return pthread_getspecific(static_cast<pthread_key_t>(key)); }
int set_specific(uint64_t key, const void* value) MACOS(pthread_setspecific);
int set_specific(uint64_t key, const void* value) { return pthread_setspecific(static_cast<pthread_key_t>(key), value); }

// macOS's numbers of lazy, now, local, global.
void* open_library(const char* path, int mode) MACOS(dlopen);
void* open_library(const char* path, int mode) {
  if ((mode & ~0xf) != 0) std::abort();
  return dlopen(path, (mode & 2 ? RTLD_NOW : RTLD_LAZY) | (mode & 8 ? RTLD_GLOBAL : RTLD_LOCAL));
}

struct Answer {
  const char* mac;
  const char* name;
  int value;
};
// Features by Mac: macOS 11 has no names that begin with FEAT_. "future" has more than lowbit uses. "neither" denies all
// features, as no real Mac does.
constexpr Answer kAnswers[] = {
    {"macos11", "hw.optional.neon", 1},
    {"macos11", "hw.optional.armv8_2_fhm", 1},
    {"m1", "hw.optional.arm.FEAT_DotProd", 1},
    {"m1", "hw.optional.arm.FEAT_I8MM", 0},
    {"m1", "hw.nperflevels", 2},
    {"m1", "hw.perflevel0.physicalcpu", 4},
    {"m1", "hw.perflevel0.cpusperl2", 4},
    {"m1", "hw.perflevel1.physicalcpu", 4},
    {"m1", "hw.perflevel1.cpusperl2", 4},
    {"m2", "hw.optional.arm.FEAT_DotProd", 1},
    {"m2", "hw.optional.arm.FEAT_I8MM", 1},
    {"m2", "hw.optional.arm.FEAT_SME2", 0},
    {"m4", "hw.optional.arm.FEAT_DotProd", 1},
    {"m4", "hw.optional.arm.FEAT_I8MM", 1},
    {"m4", "hw.optional.arm.FEAT_SME", 1},
    {"m4", "hw.optional.arm.FEAT_SME2", 1},
    {"m4", "hw.nperflevels", 2},
    {"m4", "hw.perflevel0.physicalcpu", 10},
    {"m4", "hw.perflevel0.cpusperl2", 5},
    {"m4", "hw.perflevel1.physicalcpu", 4},
    {"m4", "hw.perflevel1.cpusperl2", 4},
    {"future", "hw.optional.arm.FEAT_DotProd", 1},
    {"future", "hw.optional.arm.FEAT_I8MM", 1},
    {"future", "hw.optional.arm.FEAT_SME2", 1},
    {"future", "hw.optional.arm.FEAT_SME3", 1},
    {"neither", "hw.optional.arm.FEAT_DotProd", 0},
    {"neither", "hw.optional.arm.FEAT_I8MM", 0},
};

// Numbers of four bytes, as these are on macOS.
int answer(const char* name, void* value, size_t* size, void* new_value, size_t) MACOS(sysctlbyname);
int answer(const char* name, void* value, size_t* size, void* new_value, size_t) {
  const char* const mac = std::getenv("LOWBIT_TEST_MAC");
  if (mac == nullptr || value == nullptr || *size < sizeof(int) || new_value != nullptr) std::abort();
  for (const Answer& each : kAnswers) {
    if (std::strcmp(each.mac, mac) == 0 && std::strcmp(each.name, name) == 0) {
      std::memcpy(value, &each.value, sizeof each.value);
      *size = sizeof each.value;
      return 0;
    }
  }
  errno = ENOENT;
  return -1;
}

}  // extern "C"

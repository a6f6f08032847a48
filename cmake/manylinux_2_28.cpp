// Functions that headers of newer C and C++ libraries call and that manylinux_2_28's libraries lack.
#include <new>

#ifdef LOWBIT_STRING_STREAMS
#include <sstream>
// GCC 9 and 11 moved these into the library, and their headers refer to them.
template class std::basic_stringbuf<char>;
template class std::basic_ostringstream<char>;
template class std::basic_stringstream<char>;
#endif

// glibc 2.32: whether the process has only one thread, so that std::shared_ptr can skip atomics. False is always correct.
extern "C" [[gnu::visibility("hidden")]] char __libc_single_threaded;
char __libc_single_threaded = 0;

// GCC 11: std::vector calls this for an impossible size.
namespace std {
[[noreturn]] void __throw_bad_array_new_length();
void __throw_bad_array_new_length() { throw bad_array_new_length(); }
}  // namespace std

// GCC 11: parts of copying and destroying a std::exception_ptr, which were not separate functions before.
#ifdef LOWBIT_EXCEPTION_POINTERS
extern "C" {
void lowbit_copy(void* pointer, const void* from) __asm__("_ZNSt15__exception_ptr13exception_ptrC1ERKS0_");
void lowbit_destroy(void* pointer) __asm__("_ZNSt15__exception_ptr13exception_ptrD1Ev");
[[gnu::visibility("hidden")]] void lowbit_add_reference(void* pointer)
    __asm__("_ZNSt15__exception_ptr13exception_ptr9_M_addrefEv");
[[gnu::visibility("hidden")]] void lowbit_release(void* pointer)
    __asm__("_ZNSt15__exception_ptr13exception_ptr10_M_releaseEv");
void lowbit_add_reference(void* pointer) {
  void* never_destroyed;
  lowbit_copy(&never_destroyed, pointer);
}
void lowbit_release(void* pointer) { lowbit_destroy(pointer); }
}
#endif

// What the headers of newer C and C++ libraries call, and those of manylinux_2_28 do not have.
#include <new>

#ifdef LOWBIT_STRING_STREAMS
#include <sstream>
// GCC 9 and 11 compiled more of them into their library, and its headers say so.
template class std::basic_stringbuf<char>;
template class std::basic_ostringstream<char>;
template class std::basic_stringstream<char>;
#endif

// glibc 2.32: whether there is one thread only, which spares std::shared_ptr its atomics. No: that is always right.
extern "C" [[gnu::visibility("hidden")]] char __libc_single_threaded;
char __libc_single_threaded = 0;

// GCC 11: std::vector calls it for a size that cannot be.
namespace std {
[[noreturn]] void __throw_bad_array_new_length();
void __throw_bad_array_new_length() { throw bad_array_new_length(); }
}  // namespace std

// GCC 11: the two halves of copying and destroying a std::exception_ptr, which were there before as a whole.
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

// A dependency of another library: FAULT_needs_another of faults.cpp.
#include <lowbit/kernels/export.h>

extern "C" LOWBIT_API const char* another_vendor() { return nullptr; }

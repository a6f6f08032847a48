#pragma once

// What a shared library exports: liblowbit to the operator libraries, a kernel library its one function. All else is hidden.
#ifdef _WIN32
#define LOWBIT_API __declspec(dllexport)
#else
#define LOWBIT_API __attribute__((visibility("default")))
#endif

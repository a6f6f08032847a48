#pragma once

// Marks exports of shared libraries: liblowbit's for the operator libraries, and a kernel library's function. Everything else
// is hidden.
#ifdef _WIN32
#define LOWBIT_API __declspec(dllexport)
#else
#define LOWBIT_API __attribute__((visibility("default")))
#endif

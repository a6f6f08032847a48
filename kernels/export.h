#pragma once

// Marks exports of shared libraries: functions of liblowbit for the operator libraries, and the function of a kernel library.
// Everything else is hidden.
#ifdef _WIN32
#define LOWBIT_API __declspec(dllexport)
#else
#define LOWBIT_API __attribute__((visibility("default")))
#endif

#pragma once

// What liblowbit.so shows to the operator libraries; everything else is hidden.
#ifdef _WIN32
#define LOWBIT_API __declspec(dllexport)
#else
#define LOWBIT_API __attribute__((visibility("default")))
#endif

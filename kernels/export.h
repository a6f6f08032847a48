#pragma once

// What liblowbit.so shows to the operator libraries; everything else is hidden.
#define LOWBIT_API __attribute__((visibility("default")))

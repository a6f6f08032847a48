// What FreeBSD's header of this name has for kernels/isa.cpp, for a compiler of another system.
#pragma once

constexpr int AT_HWCAP = 25, AT_HWCAP2 = 26;
extern "C" int elf_aux_info(int type, void* value, int size);

// The part of FreeBSD's header of this name that kernels/isa.cpp uses, for compilers of other systems.
#pragma once

constexpr int AT_HWCAP = 25, AT_HWCAP2 = 26;
extern "C" int elf_aux_info(int type, void* value, int size);

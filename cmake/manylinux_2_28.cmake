# Libraries that a newer GCC and glibc make, and that load where the C library is 2.28 and GCC was 8: what manylinux_2_28
# allows, and what PyTorch's own wheels need. `auditwheel show` says whether it is enough (scripts/wheels.py asks it).
foreach(target lowbit lowbit_torch lowbit_executorch _C)
  if(NOT TARGET ${target})
    continue()
  endif()
  target_compile_definitions(${target} PRIVATE LOWBIT_MANYLINUX_2_28)
  target_sources(${target} PRIVATE "${CMAKE_CURRENT_LIST_DIR}/manylinux_2_28.cpp")
endforeach()
# torch's headers use string streams, pybind11's pointers to exceptions.
if(TARGET lowbit_torch)
  target_compile_definitions(lowbit_torch PRIVATE LOWBIT_STRING_STREAMS)
endif()
if(TARGET _C)
  target_compile_definitions(_C PRIVATE LOWBIT_EXCEPTION_POINTERS)
endif()
# What ops/shared_library.cpp and ops/scratch.cpp use was here before glibc 2.34.
target_link_options(lowbit PRIVATE "LINKER:--push-state,--no-as-needed,-l:libdl.so.2,-l:libpthread.so.0,--pop-state")

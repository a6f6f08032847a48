# Makes libraries that are built by a newer GCC and glibc load with glibc 2.28 and GCC 8's C++ library, as manylinux_2_28
# requires and PyTorch's wheels do. scripts/wheels.py checks the result by `auditwheel show`.
foreach(target lowbit lowbit_torch lowbit_executorch _C)
  if(NOT TARGET ${target})
    continue()
  endif()
  target_sources(${target} PRIVATE "${CMAKE_CURRENT_LIST_DIR}/manylinux_2_28.cpp")
endforeach()
# Of one file, so that ccache finds the objects of all others.
set_source_files_properties(ops/shared_library.cpp PROPERTIES COMPILE_DEFINITIONS LOWBIT_MANYLINUX_2_28)
# torch's headers use string streams, pybind11's pointers to exceptions.
if(TARGET lowbit_torch)
  target_compile_definitions(lowbit_torch PRIVATE LOWBIT_STRING_STREAMS)
endif()
if(TARGET _C)
  target_compile_definitions(_C PRIVATE LOWBIT_EXCEPTION_POINTERS)
endif()
# Before glibc 2.34, functions of ops/shared_library.cpp were in these libraries.
set(linked lowbit)
if(LOWBIT_STATIC)
  set(linked lowbit_torch)
endif()
target_link_options(${linked} PRIVATE "LINKER:--push-state,--no-as-needed,-l:libdl.so.2,-l:libpthread.so.0,--pop-state")

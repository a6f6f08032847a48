# GCC also schedules before it allocates registers, which costs copies in kernels that keep nearly all registers busy
# (GCC 12: up to 14 % more instructions). Scheduling afterwards is enough.
set(no_early_scheduling "$<$<CXX_COMPILER_ID:GNU>:-fno-schedule-insns>")

# GCC also turns a chain of additions into a tree, or delays the additions, and either way keeps the products that it
# adds: on the stack, in kernels that keep nearly all registers busy (GCC 12: 1.4 times slower).
set(additions_in_order "$<$<CXX_COMPILER_ID:GNU>:-fno-tree-reassoc -fno-tree-ter>")

# The instruction sets that kernels are written for, and the only place where a file gets ISA flags.
# A kernel file is named after its ISA (kernels/<family>/<isa>.cpp) and is compiled when the processor matches.
#   name | processor | flags
set(LOWBIT_ISAS
  "portable|any|"
  "neon|aarch64|"
  "neondot|aarch64|-march=armv8.2-a+dotprod ${no_early_scheduling}"
  "i8mm|aarch64|-march=armv8.2-a+dotprod+i8mm ${no_early_scheduling}"
  "avx2|x86_64|-mavx2 -mfma -mf16c ${additions_in_order}"
  "avxvnni|x86_64|-mavx2 -mfma -mf16c -mavxvnni"
  "avx512vnni|x86_64|-mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni -mavx2 -mfma -mf16c"
  "amx|x86_64|-mamx-tile -mamx-int8 -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni -mavx2 -mfma -mf16c"
)

string(TOLOWER "${CMAKE_SYSTEM_PROCESSOR}" LOWBIT_PROCESSOR)
if(LOWBIT_PROCESSOR MATCHES "^(arm64|aarch64)$")
  set(LOWBIT_PROCESSOR aarch64)
elseif(LOWBIT_PROCESSOR MATCHES "^(amd64|x86_64)$")
  set(LOWBIT_PROCESSOR x86_64)
endif()

# Collects the kernel files for this processor into `out` and sets each one's flags.
function(lowbit_kernel_sources out)
  set(sources)
  foreach(row IN LISTS LOWBIT_ISAS)
    string(REPLACE "|" ";" fields "${row}")
    list(GET fields 0 name)
    list(GET fields 1 processor)
    list(GET fields 2 flags)
    if(NOT processor STREQUAL "any" AND NOT processor STREQUAL LOWBIT_PROCESSOR)
      continue()
    endif()
    file(GLOB files CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/kernels/*/${name}.cpp")
    if(files AND flags)
      set_source_files_properties(${files} DIRECTORY "${PROJECT_SOURCE_DIR}" PROPERTIES COMPILE_FLAGS "${flags}")
      if(LOWBIT_SANITIZE)
        # Memory is what a linear kernel for vectors can get wrong. With the other checks GCC takes five minutes for a
        # file, and a seventh of that without; the portable kernel has them all.
        set(linear ${files})
        list(FILTER linear INCLUDE REGEX "/kernels/linear/")
        set_source_files_properties(${linear} DIRECTORY "${PROJECT_SOURCE_DIR}" PROPERTIES
          COMPILE_FLAGS "${flags} -fno-sanitize=undefined")
      endif()
    endif()
    list(APPEND sources ${files})
  endforeach()
  set(${out} ${sources} PARENT_SCOPE)
endfunction()

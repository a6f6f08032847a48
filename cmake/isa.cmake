# GCC also schedules before it allocates registers, which costs copies in kernels that keep nearly all registers busy
# (GCC 12: up to 14 % more instructions). Scheduling afterwards is enough.
set(no_early_scheduling "$<$<CXX_COMPILER_ID:GNU>:-fno-schedule-insns>")

# GCC also turns a chain of additions into a tree, or delays the additions. Both keep the addends on the stack, in kernels that
# keep nearly all registers busy (GCC 12: 1.4 times slower).
set(additions_in_order "$<$<CXX_COMPILER_ID:GNU>:-fno-tree-reassoc -fno-tree-ter>")

# All kernels use -O3: with -O2 GCC 12 does not unroll the loops over a tile's rows, and their sums stay in memory.

# The instruction sets of the kernels. Only this table gives ISA flags to files.
# A kernel file is named after its ISA (kernels/<family>/<isa>.cpp, or <isa>_<part>.cpp if one file would take long to
# compile) and is compiled if the processor matches.
#   name | processor | flags
set(LOWBIT_ISAS
  "portable|any|"
  "neon|aarch64|"
  "neondot|aarch64|-march=armv8.2-a+dotprod ${no_early_scheduling}"
  "i8mm|aarch64|-march=armv8.2-a+dotprod+i8mm ${no_early_scheduling}"
  "bf16|aarch64|"  # bf16 and sve2 are only for kernel libraries
  "sve2|aarch64|"
  "sme2|aarch64|-march=armv8-a+sme2"  # without SVE: CPUs with SME2 need not have SVE, and compilers would use it
  "avx2|x86_64|-mavx2 -mfma -mf16c ${additions_in_order}"
  "avxvnni|x86_64|-mavx2 -mfma -mf16c -mavxvnni"
  "avxvnniint8|x86_64|-mavx2 -mfma -mf16c"  # its instructions are in assembly
  "avx512vnni|x86_64|-mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni -mavx2 -mfma -mf16c"
  "amx|x86_64|-mamx-tile -mamx-int8 -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni -mavx2 -mfma -mf16c"
)

string(TOLOWER "${CMAKE_SYSTEM_PROCESSOR}" LOWBIT_PROCESSOR)
if(LOWBIT_PROCESSOR MATCHES "^(arm64|aarch64)$")
  set(LOWBIT_PROCESSOR aarch64)
elseif(LOWBIT_PROCESSOR MATCHES "^(amd64|x86_64)$")
  set(LOWBIT_PROCESSOR x86_64)
endif()

# SME2 requires Clang 19 or later (Apple's: 17). GCC's +sme2 also enables SVE, even in ordinary functions. If the build uses
# another compiler, a Clang that is found compiles these files; without one they are omitted.
set(LOWBIT_SME2_COMPILER "" CACHE FILEPATH "A clang++ for kernels/*/sme2.cpp (looked for when empty)")
set(sme2_flags "-march=armv8-a+sme2")
set(sme2_probe "${CMAKE_CURRENT_LIST_DIR}/sme2_probe.cpp")

# Finds the compiler for the files for SME2: "" for that of the build, a command with its target, or NOTFOUND.
function(lowbit_find_sme2_compiler out)
  if(CMAKE_CXX_COMPILER_ID MATCHES "Clang" AND NOT LOWBIT_SME2_COMPILER)
    set(CMAKE_TRY_COMPILE_TARGET_TYPE STATIC_LIBRARY)  # the probe is not a program
    try_compile(LOWBIT_SME2_BUILT_IN SOURCES "${sme2_probe}" COMPILE_DEFINITIONS ${sme2_flags} CXX_STANDARD 20)
    if(LOWBIT_SME2_BUILT_IN)
      set(${out} "" PARENT_SCOPE)
      return()
    endif()
  endif()
  set(target "${CMAKE_CXX_COMPILER_TARGET}")
  if(NOT target)
    execute_process(COMMAND "${CMAKE_CXX_COMPILER}" -dumpmachine OUTPUT_VARIABLE target
      OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  endif()
  set(names clang++)
  foreach(version RANGE 19 29)
    list(PREPEND names clang++-${version})
  endforeach()
  find_program(sme2_clang NAMES ${names} NAMES_PER_DIR NO_CACHE)
  foreach(compiler IN ITEMS "${LOWBIT_SME2_COMPILER}" "${sme2_clang}")
    if(compiler)
      set(command "${compiler}" "--target=${target}")
      execute_process(COMMAND ${command} -std=c++20 ${sme2_flags} -fsyntax-only "${sme2_probe}"
        RESULT_VARIABLE failed OUTPUT_QUIET ERROR_QUIET)
      if(NOT failed)
        set(${out} "${command}" PARENT_SCOPE)
        return()
      endif()
    endif()
  endforeach()
  set(${out} NOTFOUND PARENT_SCOPE)
endfunction()

if(LOWBIT_PROCESSOR STREQUAL "aarch64")
  lowbit_find_sme2_compiler(LOWBIT_SME2_COMMAND)
  if(LOWBIT_SME2_COMMAND MATCHES "NOTFOUND$")
    message(WARNING "The kernels for SME2 are left out: they want clang++ 19 or later (Debian: apt-get install "
      "clang-19; or -DLOWBIT_SME2_COMPILER=<path>). CPUs with SME2 will run those for i8mm.")
    set_source_files_properties(kernels/registry.cpp PROPERTIES COMPILE_DEFINITIONS LOWBIT_WITHOUT_SME2)
  elseif(LOWBIT_SME2_COMMAND)
    list(GET LOWBIT_SME2_COMMAND 0 compiler)
    message(STATUS "The kernels for SME2 are built by ${compiler}")
  endif()
endif()

# vpdpbssd is written in assembly, which binutils support from 2.40 on, and Clang from 16 on.
if(LOWBIT_PROCESSOR STREQUAL "x86_64")
  include(CheckCXXSourceCompiles)
  set(CMAKE_TRY_COMPILE_TARGET_TYPE STATIC_LIBRARY)
  check_cxx_source_compiles("void f() { __asm__(\"vpdpbssd %ymm0, %ymm1, %ymm2\"); }" LOWBIT_HAS_AVXVNNIINT8)
  unset(CMAKE_TRY_COMPILE_TARGET_TYPE)
  if(NOT LOWBIT_HAS_AVXVNNIINT8)
    message(WARNING "The kernels for AVX-VNNI-INT8 are left out: the assembler does not know them. CPUs with it will run those "
      "for AVX-VNNI.")
    set_source_files_properties(kernels/registry.cpp PROPERTIES COMPILE_DEFINITIONS LOWBIT_WITHOUT_AVXVNNIINT8)
  endif()
endif()

# Collects the kernel files for this processor in `out` and sets their flags. In a build with sanitizers, files that are not
# checked go to LOWBIT_UNCHECKED_SOURCES instead, and their ISAs to LOWBIT_UNCHECKED_ISAS.
function(lowbit_kernel_sources out)
  set(sources)
  set(unchecked_sources)
  set(unchecked_isas)
  set(sanitize_by_calls)
  if(LOWBIT_SANITIZE AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # Calls instead of inline checks. Inline checks make other files fast to run, but these slow to compile.
    set(sanitize_by_calls "--param=asan-instrumentation-with-call-threshold=0")
    foreach(family attention elementwise recurrence)
      set_source_files_properties("${PROJECT_SOURCE_DIR}/kernels/${family}/portable.cpp" DIRECTORY "${PROJECT_SOURCE_DIR}"
        PROPERTIES COMPILE_FLAGS "${sanitize_by_calls}")
    endforeach()
  endif()
  set(cpu_flags)
  set(linux_avxvnni avx_vnni)
  set(linux_avx512vnni avx512_vnni)
  set(linux_avxvnniint8 avx_vnni_int8)
  set(linux_amx amx_int8)
  if(LOWBIT_SANITIZE AND NOT CMAKE_CROSSCOMPILING AND EXISTS /proc/cpuinfo)
    file(STRINGS /proc/cpuinfo cpu_flags REGEX "^flags" LIMIT_COUNT 1)
    string(APPEND cpu_flags "\n")
  endif()
  foreach(row IN LISTS LOWBIT_ISAS)
    string(REPLACE "|" ";" fields "${row}")
    list(GET fields 0 name)
    list(GET fields 1 processor)
    list(GET fields 2 flags)
    if(NOT processor STREQUAL "any" AND NOT processor STREQUAL LOWBIT_PROCESSOR)
      continue()
    endif()
    if(name STREQUAL "sme2" AND LOWBIT_SME2_COMMAND MATCHES "NOTFOUND$")
      continue()
    elseif(name STREQUAL "avxvnniint8" AND NOT LOWBIT_HAS_AVXVNNIINT8)
      continue()
    endif()
    file(GLOB files CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/kernels/*/${name}.cpp"
      "${PROJECT_SOURCE_DIR}/kernels/*/${name}_*.cpp")
    if(files AND flags)
      set_source_files_properties(${files} DIRECTORY "${PROJECT_SOURCE_DIR}" PROPERTIES COMPILE_FLAGS "${flags}")
      if(LOWBIT_SANITIZE)
        # Vector kernels can mainly make errors of memory access. The other checks would increase GCC's time per file sevenfold,
        # to five minutes. The portable kernels have all checks.
        set(wide ${files})
        list(FILTER wide INCLUDE REGEX "/kernels/(linear|attention|elementwise|recurrence)/")
        set_source_files_properties(${wide} DIRECTORY "${PROJECT_SOURCE_DIR}" PROPERTIES
          COMPILE_FLAGS "${flags} -fno-sanitize=undefined ${sanitize_by_calls}")
        # Kernels that this machine's CPU cannot run are not checked, because no test runs them. AVX2 kernels take GCC longest.
        # With AVX-512 operators do not choose them, and kernel tests have buffers between guard pages in every build, so
        # AddressSanitizer would add little.
        set(unchecked FALSE)
        if(NOT LOWBIT_SANITIZE_KERNELS)
          set(unchecked TRUE)
        elseif(NOT cpu_flags)
        elseif(name MATCHES "^(avxvnni|avxvnniint8|avx512vnni|amx)$")
          if(NOT cpu_flags MATCHES " ${linux_${name}}( |\n)")
            set(unchecked TRUE)
          endif()
        elseif(name STREQUAL "avx2" AND LOWBIT_SANITIZE MATCHES "address" AND NOT LOWBIT_SANITIZE_EVERY_KERNEL)
          if(cpu_flags MATCHES " ${linux_avx512vnni}( |\n)")
            set(unchecked TRUE)
          endif()
        endif()
        if(unchecked)
          set_source_files_properties(${files} DIRECTORY "${PROJECT_SOURCE_DIR}" PROPERTIES COMPILE_FLAGS "${flags}")
          list(APPEND unchecked_sources ${files})
          list(APPEND unchecked_isas ${name})
          continue()
        endif()
      endif()
    endif()
    if(name STREQUAL "neon")  # of plain NEON's kernels only the tiles keep nearly all registers busy
      set(tiles ${files})
      list(FILTER tiles INCLUDE REGEX "/neon_tiles")
      set_source_files_properties(${tiles} DIRECTORY "${PROJECT_SOURCE_DIR}" PROPERTIES
        COMPILE_OPTIONS "${no_early_scheduling}")
    endif()
    if(name STREQUAL "sme2" AND LOWBIT_SANITIZE AND files)
      set_source_files_properties(${files} DIRECTORY "${PROJECT_SOURCE_DIR}" PROPERTIES
        COMPILE_FLAGS "${flags} -fno-sanitize=all")  # the sanitizers' calls do not exist in streaming mode
    endif()
    list(APPEND sources ${files})
  endforeach()
  set(${out} ${sources} PARENT_SCOPE)
  set(LOWBIT_UNCHECKED_SOURCES ${unchecked_sources} PARENT_SCOPE)
  set(LOWBIT_UNCHECKED_ISAS ${unchecked_isas} PARENT_SCOPE)
endfunction()

# Takes the files for SME2 out of `sources` if another compiler must build them, with the project's own flags, and sets
# LOWBIT_OTHER_OBJECTS: the objects that are not in $<TARGET_OBJECTS:lowbit>.
function(lowbit_sources_of_others sources)
  set(objects)
  if(LOWBIT_SME2_COMMAND)
    set(others ${${sources}})
    list(FILTER others INCLUDE REGEX "/sme2[.]cpp$")
    foreach(source IN LISTS others)
      file(RELATIVE_PATH name "${PROJECT_SOURCE_DIR}" "${source}")
      set(object "${PROJECT_BINARY_DIR}/other_compiler/${name}.o")
      cmake_path(GET object PARENT_PATH directory)
      file(MAKE_DIRECTORY "${directory}")
      add_custom_command(OUTPUT "${object}"
        COMMAND ${CMAKE_CXX_COMPILER_LAUNCHER} ${LOWBIT_SME2_COMMAND} ${sme2_flags} -std=c++20 -O3 -DNDEBUG -fPIC
                -ffp-contract=off -fno-math-errno -fvisibility=hidden -fvisibility-inlines-hidden -Wall -Wextra
                -MD -MF "${object}.d" -MT "${object}" -c "${source}" -o "${object}"
        DEPENDS "${source}" DEPFILE "${object}.d" VERBATIM)
      list(REMOVE_ITEM ${sources} "${source}")
      list(APPEND objects "${object}")
    endforeach()
  endif()
  set(${sources} ${${sources}} PARENT_SCOPE)
  set(LOWBIT_OTHER_OBJECTS ${objects} PARENT_SCOPE)
endfunction()

# Cross build with the Clang of the PyPI package ziglang, which has headers and link libraries of each system:
#   cmake -DCMAKE_TOOLCHAIN_FILE=cmake/zig.cmake -DLOWBIT_ZIG_TARGET=aarch64-macos.11.0
# Targets: aarch64-macos.11.0, aarch64-ios.14.0 (with LOWBIT_STATIC), aarch64-windows-gnu, x86_64-windows-gnu and others of
# `zig targets`. LOWBIT_ZIG is the path of zig.
set(LOWBIT_ZIG_TARGET "" CACHE STRING "What to build for, in Zig's words")
set(LOWBIT_ZIG "zig" CACHE STRING "The program zig")
list(APPEND CMAKE_TRY_COMPILE_PLATFORM_VARIABLES LOWBIT_ZIG_TARGET LOWBIT_ZIG)
if(NOT LOWBIT_ZIG_TARGET MATCHES "^(aarch64|x86_64)-(macos|ios|windows|linux)")
  message(FATAL_ERROR "LOWBIT_ZIG_TARGET is '${LOWBIT_ZIG_TARGET}'; expected aarch64 or x86_64, "
    "then -macos, -ios, -windows or -linux, for example aarch64-macos.11.0")
endif()
set(CMAKE_SYSTEM_PROCESSOR ${CMAKE_MATCH_1})
set(names macos Darwin ios Darwin windows Windows linux Linux)
list(FIND names ${CMAKE_MATCH_2} index)
math(EXPR index "${index} + 1")
list(GET names ${index} CMAKE_SYSTEM_NAME)

# Zig uses Apple's headers only for macOS, although they are the same for all of Apple's systems.
set(headers)
if(LOWBIT_ZIG_TARGET MATCHES "-ios")
  cmake_path(GET LOWBIT_ZIG PARENT_PATH zig_directory)
  set(headers -isystem "${zig_directory}/lib/libc/include/any-darwin-any")
endif()

foreach(tool cc c++)
  string(REPLACE "cc" C language ${tool})
  string(REPLACE "c++" CXX language ${language})
  set(CMAKE_${language}_COMPILER "${CMAKE_CURRENT_LIST_DIR}/../scripts/zig.sh" "${LOWBIT_ZIG}" ${tool}
    -target ${LOWBIT_ZIG_TARGET} ${headers})
endforeach()
# CMake needs these two as separate programs.
foreach(tool ar ranlib)
  set(program "${CMAKE_BINARY_DIR}/zig-${tool}")
  file(CONFIGURE OUTPUT "${program}" CONTENT "#!/bin/sh\nexec '@LOWBIT_ZIG@' @tool@ \"$@\"\n" @ONLY)
  file(CHMOD "${program}" PERMISSIONS OWNER_READ OWNER_WRITE OWNER_EXECUTE)
  string(TOUPPER ${tool} name)
  set(CMAKE_${name} "${program}")
endforeach()

if(CMAKE_SYSTEM_NAME STREQUAL "Darwin")
  set(CMAKE_INSTALL_NAME_TOOL "not-needed")  # libraries are linked with their install names
  set(CMAKE_STRIP "")  # this machine's strip cannot read Mach-O, and a changed file would not match its signature
  set(CMAKE_BUILD_WITH_INSTALL_RPATH ON)
  # The part of the system's C++ library that torch uses: scripts/macos_libraries.py.
  set(LOWBIT_LIBCXX "" CACHE FILEPATH "A .tbd file of macOS's libc++")
  list(APPEND CMAKE_TRY_COMPILE_PLATFORM_VARIABLES LOWBIT_LIBCXX)
  set(CMAKE_SHARED_LINKER_FLAGS_INIT "-nostdlib++ -Wl,-S")
  set(CMAKE_MODULE_LINKER_FLAGS_INIT "-nostdlib++ -Wl,-S")
  set(CMAKE_CXX_STANDARD_LIBRARIES "${LOWBIT_LIBCXX}")
endif()
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
# CMake's compiler checks do not link, because zig would first build its C++ library, which takes minutes.
set(CMAKE_TRY_COMPILE_TARGET_TYPE STATIC_LIBRARY)

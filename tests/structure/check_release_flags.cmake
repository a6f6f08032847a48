# Configures the project twice: CMAKE_CXX_FLAGS_RELEASE is what the user says, and by default -O3 with asserts.
#   cmake -DSOURCE= -DBUILD= -DGENERATOR= -DMAKE_PROGRAM= -DTOOLCHAIN= -P check_release_flags.cmake
function(commands_of out name)
  file(REMOVE_RECURSE "${BUILD}/${name}")
  execute_process(
    COMMAND "${CMAKE_COMMAND}" -G "${GENERATOR}" -DCMAKE_MAKE_PROGRAM=${MAKE_PROGRAM} -DCMAKE_TOOLCHAIN_FILE=${TOOLCHAIN}
            -DCMAKE_EXPORT_COMPILE_COMMANDS=ON ${ARGN} -S "${SOURCE}" -B "${BUILD}/${name}"
    OUTPUT_QUIET COMMAND_ERROR_IS_FATAL ANY)
  file(READ "${BUILD}/${name}/compile_commands.json" commands)
  string(REGEX MATCH "\"command\": [^\n]*format\\.cpp[^\n]*" command "${commands}")
  set(${out} "${command}" PARENT_SCOPE)
endfunction()

commands_of(chosen chosen "-DCMAKE_CXX_FLAGS_RELEASE=-O2 -DCHOSEN_BY_THE_USER")
if(NOT chosen MATCHES " -O2 -DCHOSEN_BY_THE_USER " OR chosen MATCHES " -O3 ")
  message(FATAL_ERROR "CMAKE_CXX_FLAGS_RELEASE is '-O2 -DCHOSEN_BY_THE_USER', and a file is compiled with: ${chosen}")
endif()
commands_of(default default)
if(NOT default MATCHES " -O3 ")
  message(FATAL_ERROR "by default a file is not compiled with -O3, but with: ${default}")
endif()

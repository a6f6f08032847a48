# Finds the installed executorch package and defines the target executorch::runtime. A missing package is an error. With
# LOWBIT_BUILD_EXECUTORCH=AUTO it is only a message, and the Python package lacks lowbit.executorch.
#
# Like torch (cmake/torch.cmake) it is not a build requirement. It is also searched next to torch, because an isolated build
# does not have it on its path.
set(reason "not found beside torch")
if(NOT LOWBIT_EXECUTORCH_DIR)
  find_package(Python REQUIRED COMPONENTS Interpreter)
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -c "
import importlib.util, pathlib, sys, sysconfig
spec = importlib.util.find_spec('executorch')
places = [pathlib.Path(place) for place in (spec.submodule_search_locations or ())] if spec else []
places += [pathlib.Path(sysconfig.get_paths()[key]) / 'executorch' for key in ('purelib', 'platlib')]
places += [pathlib.Path(torch).parent / 'executorch' for torch in sys.argv[1:] if torch]
print(next((p.as_posix() for p in places if (p / 'lib/cmake/executorch/executorch-config.cmake').exists()), ''))"
      "${LOWBIT_TORCH_DIR}"
    OUTPUT_VARIABLE found_executorch OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
else()
  set(found_executorch "${LOWBIT_EXECUTORCH_DIR}")
endif()

if(found_executorch)
  unset(executorch_DIR CACHE)  # the result of an earlier build
  find_package(executorch CONFIG QUIET NO_DEFAULT_PATH NO_CMAKE_FIND_ROOT_PATH
    PATHS "${found_executorch}/lib/cmake/executorch")
  if(TARGET executorch::runtime)
    message(STATUS "executorch: ${found_executorch}")
    # The targets put the path of this installation into libraries; ours must also work with any other installation.
    foreach(target executorch::runtime executorch::threadpool)
      if(TARGET ${target})
        set_property(TARGET ${target} PROPERTY INTERFACE_LINK_OPTIONS "")
      endif()
    endforeach()
  else()
    set(reason "'${found_executorch}' has no C++ runtime (needs executorch >= 1.5 and CMake >= 3.28)")
  endif()
endif()

if(NOT TARGET executorch::runtime)
  if(LOWBIT_BUILD_EXECUTORCH STREQUAL "AUTO")
    message(STATUS "executorch: ${reason}; building without lowbit.executorch")
  else()
    message(FATAL_ERROR "executorch: ${reason}.\n"
      "Install it first (pip install executorch==1.5.1), or pass -DLOWBIT_EXECUTORCH_DIR=<site-packages>/executorch.")
  endif()
endif()

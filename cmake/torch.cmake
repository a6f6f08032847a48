# Finds the installed torch package, for its headers and libraries, and sets LOWBIT_TORCH_DIR.
#
# torch is deliberately not a build requirement in pyproject.toml, because an isolated build would download gigabytes of a
# second torch. An isolated build environment hides the packages of its interpreter, so this looks on the path first and then in
# that interpreter's site-packages.
if(NOT LOWBIT_TORCH_DIR)
  find_package(Python REQUIRED COMPONENTS Interpreter)
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -c "
import importlib.util, pathlib, sysconfig
spec = importlib.util.find_spec('torch')
places = [pathlib.Path(spec.origin).parent] if spec and spec.origin else []
places += [pathlib.Path(sysconfig.get_paths()[key]) / 'torch' for key in ('purelib', 'platlib')]
print(next((p.as_posix() for p in places if (p / 'include/torch/csrc/stable/ops.h').exists()), ''))"
    OUTPUT_VARIABLE LOWBIT_TORCH_DIR OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
endif()
if(NOT EXISTS "${LOWBIT_TORCH_DIR}/include/torch/csrc/stable/ops.h")
  set(kind FATAL_ERROR)
  set(without "")
  if(LOWBIT_BUILD_TORCH STREQUAL "AUTO")
    set(kind WARNING)
    set(without "lowbit is built without PyTorch's operators. It runs packed models, and quantizes none.\n")
    set(want_torch OFF)
  endif()
  message(${kind}
    "torch >= 2.10 was not found for ${Python_EXECUTABLE} (looked at '${LOWBIT_TORCH_DIR}').\n${without}"
    "Install it first (pip install torch==2.13.0), or pass -DLOWBIT_TORCH_DIR=<site-packages>/torch.")
  if(NOT want_torch)
    return()
  endif()
endif()
# A cross build uses the headers of this machine's torch and the libraries of the target's torch.
if(NOT LOWBIT_TORCH_LIBRARY_DIR)
  set(LOWBIT_TORCH_LIBRARY_DIR "${LOWBIT_TORCH_DIR}/lib")
endif()
message(STATUS "torch: ${LOWBIT_TORCH_DIR}, libraries: ${LOWBIT_TORCH_LIBRARY_DIR}")

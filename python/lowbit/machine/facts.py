"""Facts about the machine: CPU, peak memory, C++ compiler; and glibc's memory settings.

Functions import modules themselves, because `lowbit generate` needs only the peak memory, and the other imports take 20 ms.
"""

import sys
from pathlib import Path


def cpu_name() -> str:
    """The CPU's model name, or its architecture if the name is unknown."""
    import platform
    import subprocess

    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    for command in (["lscpu"], ["sysctl", "-n", "machdep.cpu.brand_string"]):
        try:
            text = subprocess.run(command, check=False, capture_output=True, text=True).stdout
        except OSError:
            continue
        for line in text.splitlines():
            if command != ["lscpu"] or line.startswith("Model name:"):
                return line.split(":", 1)[-1].strip()
    return platform.processor() or platform.machine()


def installed_version(package: str) -> str | None:
    """The version of a package; None: not installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def peak_memory() -> int | None:
    """Peak resident memory of this process in bytes; None if the system does not report it."""
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def free_memory() -> int | None:
    """Bytes of memory that programs can get without swapping; None if the system does not report it."""
    try:
        for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                return 1024 * int(line.split()[1])
    except (OSError, ValueError):  # not on Linux
        pass
    return None


def keep_freed_memory() -> bool:
    """Makes glibc keep freed memory for the next tensors instead of returning it to the system.

    By default glibc returns large blocks when they are freed. Every page of the next tensor then costs a page fault, which
    takes up to a quarter of the time of a model that computes hundreds of tokens per call. The process keeps its peak
    memory, except for blocks of 32 MiB and more. A second call has no effect.

    Returns:
        True on success; False without glibc (macOS, Windows, musl).
    """
    import ctypes
    import platform

    if sys.platform != "linux" or platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    trim_threshold, mmap_threshold = -1, -3  # malloc.h
    return bool(libc.mallopt(mmap_threshold, 32 << 20) and libc.mallopt(trim_threshold, (1 << 31) - 1))


def cpp_compiler() -> str:
    """The C++ compiler that torch.compile uses.

    Raises:
        OSError: there is none.
    """
    from torch._inductor import config, cpp_builder, exc

    try:
        return str(cpp_builder.get_cpp_compiler())
    except (exc.InvalidCxxCompiler, OSError) as error:  # OSError: CXX does not name a program
        named = config.cpp.cxx
        tried = named if isinstance(named, str) else named[-1]
        raise OSError(
            f"there is no C++ compiler: {tried!r} does not run. Install g++ or clang, or name one in the environment "
            "variable CXX"
        ) from error

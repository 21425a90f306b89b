"""
Calls the CUDA driver in a process of its own, with the standard library alone.

    driver.py load LIST      load the cubins of a JSON list of paths, and print each result
    driver.py sweep PTX      compile PTX, run its kernel ``sweep``, and print its three counters

Each line is a JSON object. A failure ends the output with ``{"failure": …}``.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from pathlib import Path


class DriverError(Exception):
    """A call of the driver returned an error."""


def call(name: str, *arguments: object) -> None:
    """Call the driver's function *name*; raise `DriverError` with the name of its error."""
    library = ctypes.CDLL("libcuda.so.1")
    if status := getattr(library, name)(*arguments):
        text = ctypes.c_char_p()
        library.cuGetErrorName(status, ctypes.byref(text))
        raise DriverError(f"{name}: {(text.value or b'unknown').decode()}")


def module(image: bytes) -> ctypes.c_void_p:
    """Return *image* (a cubin or PTX text), loaded."""
    handle = ctypes.c_void_p()
    call("cuModuleLoadData", ctypes.byref(handle), image)
    return handle


def show(**record: object) -> None:
    """Print a record at once, since the next call may end the process."""
    print(json.dumps(record), flush=True)  # noqa: T201  the program's output


def load(paths: list[str]) -> None:
    """Load the cubins at *paths* with all their kernels."""
    count = ctypes.c_int()
    for path in paths:
        try:
            loaded = module(Path(path).read_bytes())
            call("cuModuleGetFunctionCount", ctypes.byref(count), loaded)
            show(functions=count.value, error="")
            call("cuModuleUnload", loaded)
        except DriverError as error:
            show(functions=0, error=str(error))


def sweep(ptx: bytes) -> None:
    """Compile *ptx*, run its kernel on 1,024 blocks of 256 threads, and print its counters."""
    function, memory, size = ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_size_t(24)
    call("cuModuleGetFunction", ctypes.byref(function), module(ptx), b"sweep")
    call("cuMemAlloc_v2", ctypes.byref(memory), size)
    call("cuMemsetD8_v2", memory, 0, size)
    arguments = (ctypes.c_void_p * 1)(ctypes.addressof(memory))
    call("cuLaunchKernel", function, 1024, 1, 1, 256, 1, 1, 0, None, arguments, None)
    counters = (ctypes.c_uint64 * 3)()
    call("cuMemcpyDtoH_v2", counters, memory, size)
    show(counters=list(counters))


def main() -> None:
    """Run the command."""
    # Loading is lazy by default: a module would be accepted without a look at its kernels.
    os.environ["CUDA_MODULE_LOADING"] = "EAGER"
    command, context = sys.argv[1], ctypes.c_void_p()
    try:
        call("cuInit", 0)
        call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        call("cuCtxSetCurrent", context)
        content = Path(sys.argv[2]).read_bytes()
        return load(json.loads(content)) if command == "load" else sweep(content)
    except (OSError, DriverError) as error:
        show(failure=str(error))


if __name__ == "__main__":
    main()

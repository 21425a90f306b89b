"""
Talks to the CUDA driver in a process of its own, with the standard library alone: a driver that hangs or crashes ends this, not the gate.

    driver.py facts                 one JSON line about the first GPU, or why there is none
    driver.py load LIST START       loads every cubin of LIST from number START on and asks for each of its kernels

LIST is a JSON array of ``{"path": …, "kernels": […]}``. Each cubin gives two lines: ``{"begins": N}`` before it is touched, so that the
reader knows which one a crash belongs to, and what came of it afterwards.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sys

#: CUfunction_attribute and CUdevice_attribute, by the numbers of cuda.h.
NUM_REGS, LOCAL_BYTES = 4, 3
CLOCK_KHZ, PROCESSORS, MEMORY_KHZ, MAJOR, MINOR = 13, 16, 36, 75, 76


class Refused(Exception):
    """A call of the driver returned an error, whose name this is."""


class Driver:
    """The few calls that are needed, each checked."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")

    def call(self, name: str, *arguments: object) -> None:
        """Call *name*; raise `Refused` with the error's name where it fails."""
        status = getattr(self._library, name)(*arguments)
        if status:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(status, ctypes.byref(text))
            raise Refused((text.value or b"unknown").decode())

    def number(self, name: str, *arguments: object) -> int:
        """Return the int that *name* writes through its first argument."""
        value = ctypes.c_int()
        self.call(name, ctypes.byref(value), *arguments)
        return value.value


def say(**record: object) -> None:
    """Print a record as a line of JSON, at once: the next call may be the last."""
    print(json.dumps(record), flush=True)  # noqa: T201  this is the program's output


def facts(driver: Driver) -> None:
    """Say what the first GPU is."""
    driver.call("cuInit", 0)
    if driver.number("cuDeviceGetCount") == 0:
        raise Refused("no device")
    name, memory = ctypes.create_string_buffer(256), ctypes.c_size_t()
    driver.call("cuDeviceGetName", name, 256, 0)
    driver.call("cuDeviceTotalMem_v2", ctypes.byref(memory), 0)
    asked = {"major": MAJOR, "minor": MINOR, "processors": PROCESSORS, "clock_khz": CLOCK_KHZ, "memory_khz": MEMORY_KHZ}
    about = {key: driver.number("cuDeviceGetAttribute", which, 0) for key, which in asked.items()}
    say(name=name.value.decode("utf-8", "replace"), driver=driver.number("cuDriverGetVersion"), memory=memory.value, **about)


def attributes(driver: Driver, module: ctypes.c_void_p, kernels: list[str]) -> list[list[str]]:
    """Ask for each kernel's registers and local memory, which makes the driver look at it; return those that it refuses, with why."""
    refused = []
    for kernel in kernels:
        function = ctypes.c_void_p()
        try:
            driver.call("cuModuleGetFunction", ctypes.byref(function), module, kernel.encode())
            for which in (NUM_REGS, LOCAL_BYTES):
                driver.number("cuFuncGetAttribute", which, function)
        except Refused as error:
            refused.append([kernel, str(error)])
    return refused


def load(driver: Driver, cubins: list[dict[str, object]], start: int) -> None:
    """Load the cubins one after the other, and say what came of each."""
    driver.call("cuInit", 0)
    context = ctypes.c_void_p()
    driver.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
    driver.call("cuCtxSetCurrent", context)
    for number, cubin in enumerate(cubins[start:], start=start):
        say(begins=number)
        with open(str(cubin["path"]), "rb") as stream:  # noqa: PTH123  one line less to import
            image = stream.read()
        kernels = cubin["kernels"]
        module = ctypes.c_void_p()
        try:
            driver.call("cuModuleLoadData", ctypes.byref(module), image)
        except Refused as error:
            say(number=number, error=str(error), refused=[])
            continue
        assert isinstance(kernels, list)
        refused = attributes(driver, module, kernels)
        held = -1
        with contextlib.suppress(Refused, AttributeError):  # older than CUDA 12.4
            held = driver.number("cuModuleGetFunctionCount", module)
        driver.call("cuModuleUnload", module)
        say(number=number, error="", refused=refused, held=held)


def main() -> int:
    """Do what the command line asks for."""
    # Loading is lazy by default: a module would be taken without its kernels ever being looked at.
    os.environ["CUDA_MODULE_LOADING"] = "EAGER"
    try:
        driver = Driver()
        if sys.argv[1] == "facts":
            facts(driver)
        else:
            with open(sys.argv[2], encoding="utf-8") as stream:  # noqa: PTH123
                load(driver, json.load(stream), int(sys.argv[3]))
    except OSError as error:
        say(absent=f"the CUDA driver's library cannot be loaded: {error}")
    except Refused as error:
        say(absent=f"the CUDA driver answers {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

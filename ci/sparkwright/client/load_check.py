"""
Load modules and libraries in an environment's own Python, which runs this file as a program.

It imports nothing of sparkwright. A library that needs the driver of a GPU is left out where the
machine has none.
"""

import ctypes
import importlib
import importlib.machinery
import json
import os
import re
import sys

DONE = "sparkwright: everything is loaded"
#: An extension module for one version of Python; wheels may carry one for each.
_TAGGED = re.compile(r"\.cpython-\d+t?-[^/]*\.so\Z")
_DRIVER = re.compile(r"lib(cuda|nvidia-ml|nvcuvid|cufile)\.so")


def main(path: str) -> None:
    """Load what the file at *path* names, and write `DONE` to standard output."""
    with open(path, encoding="utf-8") as stream:  # noqa: PTH123  as little as possible is imported
        request = json.load(stream)
    for load, names in ((importlib.import_module, "modules"), (_open_library, "libraries")):
        for name in request[names]:
            try:
                load(name)
            except (ImportError, OSError) as error:
                if not _DRIVER.search(str(error)):
                    raise
                os.write(1, f"not loaded without a driver: {name}\n".encode())
    os.write(1, f"\n{DONE}\n".encode())


def _open_library(path: str) -> None:
    """Open the library at *path*, unless it is an extension module of another Python."""
    if _TAGGED.search(path) and not path.endswith(importlib.machinery.EXTENSION_SUFFIXES[0]):
        return
    with open(path, "rb") as stream:  # noqa: PTH123
        machine_code = stream.read(4) == b"\x7fELF"
    if machine_code:
        ctypes.CDLL(path)


if __name__ == "__main__":
    main(sys.argv[1])

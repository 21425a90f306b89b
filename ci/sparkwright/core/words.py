"""
The words of other programs that decide an outcome, in one table: a pattern for each, and above it
the program, what the words mean, and why no fact states it.

Exit codes, signals, numbers of errors, events of the kernel and files decide wherever they exist.
Text that does not stand here explains, and decides nothing.
"""

import re

#: git apply: a hunk was applied at other lines than it names. git has no option that refuses it,
#: and its status is 0 in both cases.
HUNK_MOVED = re.compile(r"Hunk #\d+ succeeded at \d+ \(offset -?\d+ lines?\)")

#: GCC and Clang: a program of ours names what the source file does not have. Errors of compilers
#: have no numbers, and the status of all of them is 1.
NAME_UNKNOWN = re.compile(
    r"driver\.cpp:\d+:\d+: error: (?:[‘'](?:\w+::)*\w+[’'] (?:is not a member of|was not declared|"
    r"has not been declared)|no (?:member|template) named '\w+' in|use of undeclared identifier)"
)

#: msgspec: a JSON text ends before it is complete. One class of error stands for all that can be
#: wrong with a text.
JSON_CUT_OFF = re.compile("data was truncated")

#: vLLM 0.32.0: a log probability is one that JSON cannot hold. The status is that of every request
#: that vLLM refuses.
NOT_A_NUMBER = re.compile("Out of range float values")

#: torch and the entry points of vLLM: an operator was not compiled for this GPU. Most of them raise
#: RuntimeError for it, as for every failed launch.
NOT_COMPILED = re.compile(
    "no compiled|not compiled|not implemented|notimplemented|recompile|supported|requires", re.I
)

"""
Stands in front of every compiler call of a build: lets it start when the gate says so, and ends it when the gate or ninja says so.

CMake calls it as the compiler launcher. It runs alone, on the standard library only, and imports as little of that as it can: a
build starts it once per unit. What it says to the gate, and what it hears, stands in `sparkwright.builder.compile.gate`.
"""

from __future__ import annotations

# What `socket` and `signal` add to these two is enumerations, whose import takes longer than all that happens here.
import _signal  # type: ignore[import-not-found]  # typeshed does not describe it
import _socket
import os
import select
import sys

#: Descriptors that ccache passes on to `MISS`; dash redirects single digits alone.
ANSWER, QUESTION = 8, 9
#: Stands before the compiler when ccache has no result of it (``CCACHE_PREFIX``): says so, waits for memory, becomes the compiler.
MISS = f"""#!/bin/sh
echo miss >&{QUESTION} && read -r go <&{ANSWER} || exit 1
exec {ANSWER}<&- {QUESTION}>&- "$@"
"""
#: Characters of the compiler's last words that the gate is told.
TAIL = 8000
_ENDING = (_signal.SIGINT, _signal.SIGTERM, _signal.SIGHUP)


def unit_of(command: list[str]) -> str:
    """Return the source file of a compiler call; empty when it compiles none."""
    for place, word in enumerate(command[:-1]):
        if word == "-c":
            return command[place + 1]
    return ""


def meet(folder: str) -> _socket.socket | None:
    """Return the connection to the gate of *folder*; None where there is no gate."""
    link = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    try:
        place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return None
    try:
        # A socket's address has room for 107 bytes, and folders of caches are longer.
        link.connect(f"/proc/self/fd/{place}/gate")
    except OSError:
        return None
    finally:
        os.close(place)
    return link


class Compiler:
    """The compiler call of this launcher: one at a time, in a process group of its own."""

    def __init__(self, command: list[str], link: _socket.socket) -> None:
        self._command, self._link, self._child, self._said = command, link, 0, b""

    def end(self, signal: int = 0, _: object = None) -> None:
        """End the compiler with all that it started; for a *signal*, this launcher too, by that signal."""
        if self._child:
            os.killpg(self._child, _signal.SIGKILL)
        if signal:
            _signal.signal(signal, _signal.SIG_DFL)
            os.kill(os.getpid(), signal)

    def run(self, words: list[str]) -> str:
        """Run the call as the gate's *words* say, and return what to tell the gate when it has ended."""
        environment, self._said = {**os.environ, "SPARKWRIGHT_UNIT": words[1]}, b""
        said, saying = os.pipe()
        ours, theirs, pairs, command = [said], [saying], [(os.POSIX_SPAWN_DUP2, saying, 2)], self._command
        if words[0] == "look":
            question, asking = os.pipe()
            answered, answer = os.pipe()
            ours, theirs = [said, question, answer], [saying, asking, answered]
            pairs += [(os.POSIX_SPAWN_DUP2, answered, ANSWER), (os.POSIX_SPAWN_DUP2, asking, QUESTION)]
            environment["CCACHE_PREFIX"], command = f"{environment['SPARKWRIGHT_LAUNCH']}/miss.sh", [words[2], *command]
        try:
            self._spawn(command, environment, pairs)
        finally:
            for descriptor in theirs:
                os.close(descriptor)
        stopped = self._watch(*ours)
        # While it is not waited for, nobody else can have its number; what it left running would hold memory taken for free.
        self.end()
        status, used = os.wait4(self._child, 0)[1:]
        self._child = 0
        os.set_blocking(said, False)
        while self._pass_on(said):
            pass
        for descriptor in ours:
            os.close(descriptor)
        tail = self._said.decode("utf-8", "replace")
        cost = f"{used.ru_maxrss}\t{used.ru_utime + used.ru_stime:.2f}"
        return f"{'stopped' if stopped else 'end'}\t{os.waitstatus_to_exitcode(status)}\t{cost}\t{tail}"

    def _spawn(self, command: list[str], environment: dict[str, str], pairs: list[tuple[int, int, int]]) -> None:
        # Between the start and the assignment a signal would find no compiler to end.
        _signal.pthread_sigmask(_signal.SIG_BLOCK, _ENDING)
        try:
            self._child = os.posix_spawnp(
                command[0], command, environment, file_actions=pairs, setpgroup=0, setsigmask=(),
                setsigdef=(_signal.SIGINT, _signal.SIGQUIT, _signal.SIGPIPE, _signal.SIGXFSZ),
            )  # fmt: skip
        finally:
            _signal.pthread_sigmask(_signal.SIG_UNBLOCK, _ENDING)

    def _watch(self, said: int, question: int = -1, answer: int = -1) -> bool:
        """Carry words between the gate and ccache's call of the compiler until this ends; return whether the gate stopped it."""
        life, link, stopped = os.pidfd_open(self._child), self._link.fileno(), False
        poll = select.poll()
        for descriptor in (life, link, said, question):
            if descriptor >= 0:
                poll.register(descriptor, select.POLLIN)
        while True:
            ready = {descriptor for descriptor, _ in poll.poll()}
            if said in ready and not self._pass_on(said):
                poll.unregister(said)
            if question in ready:
                if os.read(question, 100):
                    self._link.send(b"miss")
                else:
                    poll.unregister(question)
            if link in ready:
                word = self._link.recv(4096)
                if word == b"compile" and answer >= 0:
                    os.write(answer, b"go\n")
                elif word != b"compile":  # `stop`, or nothing because the build is no more
                    stopped = True
                    self.end(0 if word else _signal.SIGTERM)
            if life in ready:
                os.close(life)
                return stopped

    def _pass_on(self, said: int) -> int:
        """Pass on what the compiler says, and keep the last of it; return the number of bytes."""
        try:
            text = os.read(said, 65536)
        except BlockingIOError:
            return 0
        self._said = (self._said + text)[-TAIL:]
        rest = memoryview(text)
        while rest:
            rest = rest[os.write(2, rest) :]
        return len(text)


def main() -> int:
    command, folder = sys.argv[1:], os.environ.get("SPARKWRIGHT_LAUNCH", "")
    source = unit_of(command)
    if not source or not folder:
        os.execvp(command[0], command)
    link = meet(folder)
    if link is None:
        os.write(2, f"sparkwright: no build of {folder} is running\n".encode("utf-8", "surrogateescape"))
        return 1
    compiler = Compiler(command, link)
    for signal in _ENDING:
        _signal.signal(signal, compiler.end)
    link.send(b"unit\t" + os.fsencode(source))
    status = 1
    while True:
        words = os.fsdecode(link.recv(65536)).split("\t")
        if words[0] in ("go", "look"):
            try:
                said = compiler.run(words)
            except OSError as error:
                said = f"end\t127\t0\t0\t{command[0]}: {os.strerror(error.errno or 0)}"
                os.write(2, (said.rpartition("\t")[2] + "\n").encode("utf-8", "surrogateescape"))
            link.send(said.encode("utf-8", "replace"))
            status = int(said.split("\t")[1])
        elif words[0] == "done":
            return status if status >= 0 else 128 - status
        elif not words[0]:
            # The build has ended. A unit that never ran has not failed: at this signal ninja stops without a word about it.
            compiler.end(_signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())

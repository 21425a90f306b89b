"""
Run programs from argument lists, with a full log; none outlives this process. What a program
starts in the background may: only `run_limited`, and a sandbox in namespaces, end that with it. The
variables of their environments; the memory of this machine.
"""

import contextlib
import os
import re
import select
import shutil
import signal
import subprocess
import tempfile
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec

from sparkwright.core.errors import CommandError, Failure, PythonError, StoreError
from sparkwright.core.store import has_room, translate_disk_full

#: The folder in an environment in which its programs keep what they compile at run time.
CACHES = "caches"

#: Variable → the folder below `CACHES`. FlashInfer adds ``.cache/flashinfer`` itself. Each program
#: has its own idea of what tells the entries of a cache apart, and none looks at everything
#: (FlashInfer #4489, vLLM #41871), so no two environments share a cache.
_CACHE_VARIABLES = {
    "B12X_COMPILE_CACHE_DIR": "b12x",
    "CUDA_CACHE_PATH": "cuda",
    "CUTE_DSL_CACHE_DIR": "cute_dsl",
    "FLASHINFER_WORKSPACE_BASE": "",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "VLLM_CACHE_ROOT": "vllm",
}


def wrap_with_limits(
    command: Sequence[str | os.PathLike[str]],
    *,
    by: int = signal.SIGTERM,
    memory: int = 0,
    written: int = 0,
    path: str | None = None,
) -> list[str]:
    """
    Return *command* wrapped so that it receives the signal *by* when the thread that starts it
    dies, with optional limits of memory and file size.

    The wrappers are util-linux's setpriv and prlimit, which replace themselves by the program.
    Python's ``preexec_fn`` could do the same, but it runs the handlers of `os.register_at_fork` in
    the parent: a Ctrl-C that comes in one of them is lost, together with the lock that it holds.

    Args:
        memory: Bytes of address space; *written*: bytes of a file; 0 for no limit. With either
            there is no core dump.
        path: Where programs are looked for; the PATH of this process where it is not given.

    Raises:
        tool-missing: There is no such program, or a limit is asked for, and there is no prlimit.
    """
    words = [os.fspath(word) for word in command]
    if shutil.which(words[0], path=path) is None:
        raise CommandError("tool-missing", f"{words[0]} is not installed.")
    if memory or written:
        if not (prlimit := _util("prlimit")):
            raise CommandError(
                "tool-missing", "prlimit is not installed; it is part of util-linux."
            )
        words = [
            prlimit,
            *([f"--as={memory}"] if memory else []),
            *([f"--fsize={written}"] if written else []),
            "--core=0",
            *words,
        ]
    # A program that is not there (a bare container) is done without: then an orphan merely ends
    # later.
    setpriv = _util("setpriv")
    return [setpriv, "--pdeathsig", signal.Signals(by).name[3:], *words] if setpriv else words


def _util(name: str) -> str | None:
    """Return the path of a program of util-linux, or None."""
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/bin:/bin")


def refuse_full_disk(
    program: str, details: Sequence[str], *folders: str | os.PathLike[str]
) -> None:
    """
    Raise `disk-full` if *program*, which failed, wrote to a disk that has no room.

    Args:
        details: Its last lines, which decide nothing: a compiler quotes the sources.
        folders: The folders that it may have written to.

    Raises:
        disk-full: The file system of one of them has no room.
    """
    for folder in map(Path, folders):
        if not has_room(folder):
            raise StoreError(
                "disk-full",
                f"{program} failed, and there is no room left under {folder}.",
                details=details,
            )


def clean_environment(**extra: str) -> dict[str, str]:
    """
    Return this process's environment without the variables that change what compilers and Python
    do.

    Args:
        extra: Variables to set; an empty value removes the variable.
    """
    unwanted = (
        "PYTHONPATH",
        "PYTHONHOME",
        "CFLAGS",
        "CXXFLAGS",
        "CUDAFLAGS",
        "LDFLAGS",
        "CPATH",
        "C_INCLUDE_PATH",
        "CPLUS_INCLUDE_PATH",
        "LIBRARY_PATH",
        "COMPILER_PATH",
        "GCC_EXEC_PREFIX",
        "NVCC_PREPEND_FLAGS",
        "NVCC_APPEND_FLAGS",
        "TORCH_CUDA_ARCH_LIST",
        "CMAKE_ARGS",
        "CUDAARCHS",
        "MAKEFLAGS",
        "CMAKE_PREFIX_PATH",
        "CMAKE_TOOLCHAIN_FILE",
        "VLLM_CUTLASS_SRC_DIR",
    )
    environment = {name: value for name, value in os.environ.items() if name not in unwanted}
    environment |= {"LC_ALL": "C.UTF-8", **extra}
    return {name: value for name, value in environment.items() if value}


def uv_environment(**extra: str) -> dict[str, str]:
    """
    Return an environment in which uv does what its command line says, and nothing that variables
    or files of configuration add: another index, resolution, Python or place.

    The folder of uv's cache stays where the environment has it; certificates and proxies do, too.

    Args:
        extra: Variables to set.
    """
    unwanted = ("UV_", "PIP_", "VIRTUAL_ENV", "CONDA_")
    variables = {
        name: value
        for name, value in clean_environment().items()
        if name == "UV_CACHE_DIR" or not name.startswith(unwanted)
    }
    return {
        **variables,
        "UV_NO_CONFIG": "1",
        "UV_NO_PROGRESS": "1",
        "UV_PYTHON_DOWNLOADS": "never",
        **extra,
    }


def cache_variables(environment: Path) -> dict[str, str]:
    """Return the variables by which compiled kernels are cached in the folder *environment*."""
    caches = environment / CACHES
    return {name: str(caches / part) for name, part in _CACHE_VARIABLES.items()}


def run(
    command: Sequence[str | os.PathLike[str]],
    *,
    log: Path,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    on_line: Callable[[str], None] | None = None,
    failure: Failure = partial(CommandError, "command-failed"),
    what: str = "",
    shown: Sequence[str | os.PathLike[str]] = (),
    end_by: signal.Signals = signal.SIGTERM,
) -> None:
    """
    Run *command* until it ends, its output in *log* and line by line to *on_line*.

    Args:
        what: What failed, for the error.
        shown: The command as people know it, where *command* wraps it in others.
        end_by: How it is ended when this program is interrupted or killed.

    Raises:
        tool-missing: The program does not exist.
        command-failed: It ended with another status than 0; the error is of type *failure* and
            holds the last lines.
        disk-full: It failed, and there is no room where it writes.
    """
    words = [os.fspath(part) for part in shown or command]
    program, variables = Path(words[0]).name, clean_environment() if env is None else dict(env)
    wrapped = wrap_with_limits(command, by=end_by, path=variables.get("PATH"))
    tail: deque[str] = deque(maxlen=25)
    with translate_disk_full(log.parent):
        log.parent.mkdir(parents=True, exist_ok=True)
    with translate_disk_full(log.parent), log.open("w", encoding="utf-8") as sink:
        sink.write("$ " + " ".join(words) + "\n")
        sink.flush()
        child = subprocess.Popen(
            wrapped,
            cwd=cwd,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        assert child.stdout is not None
        try:
            for line in child.stdout:
                sink.write(line)
                tail.append(line.rstrip())
                if on_line:
                    on_line(line.rstrip())
            status = child.wait()
        except BaseException:
            # An interruption must not leave half of a build behind that still writes into the build
            # folder.
            child.send_signal(end_by)
            try:
                child.wait(timeout=20)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
            raise
    if status:
        temporary = variables.get("TMPDIR") or tempfile.gettempdir()
        refuse_full_disk(program, [*tail], cwd or log.parent, log.parent, temporary)
        how = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
        raise failure(
            what or f"{program} {how}.",
            details=[*tail, f"status: {status}", f"full log: {log}"],
            data={"status": status},
        )


def output(
    command: Sequence[str | os.PathLike[str]],
    *,
    env: Mapping[str, str] | None = None,
    timeout: float = 600,
) -> str:
    """
    Return what a short *command* prints on standard output.

    Raises:
        tool-missing: The program does not exist.
        command-failed: It ended with another status than 0, or not within *timeout* seconds.
        disk-full: It failed, and there is no room where it writes.
    """
    program, variables = Path(command[0]).name, clean_environment() if env is None else dict(env)
    try:
        # Ask the kernel to end it: an interruption during the start leaves no handle for that.
        done = subprocess.run(
            wrap_with_limits(command, by=signal.SIGKILL, path=variables.get("PATH")),
            env=variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise CommandError(
            "command-failed", f"{program} did not end within {timeout:g} s."
        ) from error
    if done.returncode:
        lines = done.stderr.splitlines()[-20:]
        written = map(variables.get, ("TMPDIR", "UV_CACHE_DIR"))
        refuse_full_disk(program, lines, *filter(None, written))
        raise CommandError(
            "command-failed", f"{program} ended with status {done.returncode}.", details=lines
        )
    return done.stdout


def memory_limit() -> int:
    """Return the bytes of memory of this machine, or of this container if it may use less."""
    import psutil

    limit: int = psutil.virtual_memory().total
    # "max" is no number, and the root of the control groups has no limit.
    with contextlib.suppress(OSError, ValueError):
        limit = min(limit, int(Path("/sys/fs/cgroup/memory.max").read_text("ascii")))
    return limit


def available_megabytes() -> int:
    """Return the megabytes that programs can still take on this machine or in this container."""
    import psutil

    free: int = psutil.virtual_memory().available
    group = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError):
        used = int((group / "memory.current").read_text())
        # Cached files are counted as used and given back when needed.
        files = re.search(
            r"^inactive_file (\d+)", (group / "memory.stat").read_text(), re.MULTILINE
        )
        free = min(free, memory_limit() - used + (int(files[1]) if files else 0))
    return free // 1_000_000


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    What one child process may use.

    Attributes:
        seconds: Of wall clock.
        memory: Megabytes of address space of each of its processes.
        written: Megabytes of each file that it writes.
    """

    seconds: Annotated[float, msgspec.Meta(gt=0)]
    memory: Annotated[int, msgspec.Meta(gt=0)]
    written: Annotated[int, msgspec.Meta(gt=0)]


class Ended(msgspec.Struct, frozen=True):
    """
    The end of a child process.

    Attributes:
        status: Its exit status; negative for the signal that ended it.
        late: Whether it was killed because it did not end in time.
        tail: The end of its output.
    """

    status: int
    late: bool
    tail: str


def run_limited(
    command: Sequence[str],
    limits: Limits,
    log: Path | None = None,
    *,
    env: Mapping[str, str] | None = None,
) -> Ended:
    """
    Run *command* within *limits*, with its output in *log*, and return how it ended. It runs in the
    folder of *log*, or in ``/`` without one.

    No process that it starts outlives the call, but one that leaves its process group.

    Args:
        env: Its environment; by default that of `clean_environment`.

    Raises:
        tool-missing: The program does not exist.
    """
    with log.open("w+b") if log else tempfile.TemporaryFile() as sink:
        child = subprocess.Popen(
            wrap_with_limits(
                command, by=signal.SIGKILL, memory=limits.memory << 20, written=limits.written << 20
            ),
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            env=clean_environment() if env is None else dict(env),
            cwd=log.parent if log else "/",
            start_new_session=True,
        )
        # `Popen.wait` with a timeout looks only every 50 ms.
        ended = os.pidfd_open(child.pid)
        try:
            late = not select.select([ended], [], [], limits.seconds)[0]
        finally:
            os.close(ended)
            # Also after a normal end: what the child started must not go on.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        sink.seek(max(0, os.fstat(sink.fileno()).st_size - 4096))
        tail = sink.read().decode("utf-8", "replace").strip()
    return Ended(child.returncode, late, tail)


def ask_python(
    failure: str,
    command: Sequence[str],
    *,
    memory: int = 4 << 20,
    seconds: float = 60,
    env: Mapping[str, str] | None = None,
) -> str:
    """
    Return the last line that *command* prints, which runs a program that a user calls a Python;
    ``.pth`` files may print something before it.

    Args:
        failure: The message if there is no answer.
        memory: Megabytes of addresses that it may use; CUDA reserves much.
        seconds: Within which it has to end.
        env: As in `run_limited`.

    Raises:
        environment-unusable: The command fails, prints nothing, or does not end.
    """
    try:
        ended = run_limited(command, Limits(seconds, memory, 1), env=env)
        details = ended.tail.splitlines()
        if details and not ended.status:
            return details[-1]
    except CommandError as error:
        details = [error.what]
    raise PythonError(
        "environment-unusable", failure, details=details[-20:], todo="Name another with --python."
    )

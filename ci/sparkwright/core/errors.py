"""
The base class of expected failures, and the failures of the core.

An error has a stable kebab-case *reference*. Its class holds a table of references: what each
means, what to do, and the exit code: 1 failed, 2 wrong usage, 4 inconclusive or not-run, 5 network
or upstream unreachable. `sparkwright.cli.main` gives 3 to faults of ours and 130 to an
interruption.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, NamedTuple


class Advice(NamedTuple):
    """The meaning of a reference, what a user can do, and the exit code."""

    means: str
    todo: str
    exit_code: int = 1


class SparkwrightError(Exception):
    """
    An expected failure.

    Args:
        reference: A key of `references`.
        what: What failed, in one sentence that names the thing.
        details: Further lines, such as both hashes of a mismatch or the last lines of a failed
            command.
        todo: What to do, where the raising code knows better than the table.
        data: The same as *details* for programs, record by name.
    """

    references: ClassVar[Mapping[str, Advice]] = {}

    def __init__(
        self,
        reference: str,
        what: str,
        *,
        details: Sequence[str] = (),
        todo: str = "",
        data: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(what)
        advice = self.references[reference]
        self.reference, self.what, self.details, self.data = (
            reference,
            what,
            tuple(details),
            dict(data or {}),
        )
        self.means, self.todo, self.exit_code = advice.means, todo or advice.todo, advice.exit_code

    def document(self) -> dict[str, object]:
        """Return the failure as the JSON object that ``--json`` prints."""
        return {
            **self.data,
            "reference": self.reference,
            "what": self.what,
            "means": self.means,
            "todo": self.todo,
            "details": list(self.details),
        }


#: What makes an error, given what failed: a class with its reference bound.
Failure = Callable[..., SparkwrightError]


def classes(base: type[SparkwrightError] = SparkwrightError) -> list[type[SparkwrightError]]:
    """Return every error class whose module is loaded."""
    return [kind for child in base.__subclasses__() for kind in (child, *classes(child))]


class UsageError(SparkwrightError):
    """The command line asks for something that does not exist."""

    references: ClassVar[Mapping[str, Advice]] = {
        "usage": Advice(
            "The command line asks for something that does not exist.",
            "See sparkwright --help.",
            exit_code=2,
        ),
    }


class FileError(SparkwrightError):
    """A file is damaged, unsafe, or does not have the expected form."""

    references: ClassVar[Mapping[str, Advice]] = {
        "access-denied": Advice(
            "The command needs a file or a folder that this user may not read or write.",
            "Correct its permissions, or name another file or folder.",
        ),
        "archive-unsafe": Advice(
            "The archive has a member that would land outside its folder, a link that leaves"
            " it, or more than it admits to.",
            "Do not unpack it by other means. Report it to the project that published it.",
        ),
        "file-invalid": Advice(
            "A reviewed file has a typo, a duplicate key, a missing field, or a value of the "
            "wrong type, such as unquoted digits.",
            "Correct the file at the line named above; strings of digits need quotes.",
        ),
    }


class CommandError(SparkwrightError):
    """A program is missing or failed."""

    references: ClassVar[Mapping[str, Advice]] = {
        "command-failed": Advice(
            "A program that was started by sparkwright ended with an error of its own.",
            "Read its last lines above; the full log is named there.",
        ),
        "part-missing": Advice(
            "The command needs packages of the part `full`, and only what installs and serves"
            " releases is installed.",
            "Install the part `full` with the command named above.",
        ),
        "tool-missing": Advice(
            "A program that the step runs is not installed on this machine.",
            "Install it as `sparkwright doctor` says.",
        ),
    }


class StoreError(SparkwrightError):
    """The cache directory or the state directory cannot be used."""

    references: ClassVar[Mapping[str, Advice]] = {
        "cache-unusable": Advice(
            "The cache directory, or the folder of installations, is a file, cannot be made or "
            "written by this user, or has a path that PATH, git or a record cannot hold.",
            "Choose another folder with SPARKWRIGHT_CACHE_DIR or --prefix, or correct its "
            "permissions.",
        ),
        "disk-full": Advice(
            "The file system of the cache directory, or that of the output, is full, or takes no "
            "file of that size.",
            "Free some space, raise the limit of `ulimit -f`, or choose another folder with "
            "SPARKWRIGHT_CACHE_DIR. Nothing finished is lost; the next run continues from here.",
        ),
        "output-unwritable": Advice(
            "Standard output or standard error leads to a file that may not grow, or to a "
            "device or network that is gone.",
            "Send the output elsewhere, and run it again. Nothing finished is lost.",
        ),
        "state-unusable": Advice(
            "The record of what this machine trusts, has seen or has started is damaged, "
            "belongs to another user, or is on a full or read-only disk.",
            "Correct its folder's permissions. Delete the file named above only if you know "
            "why it is wrong: it protects against older metadata.",
        ),
        "store-busy": Advice(
            "Another sparkwright works on the same index or the same part of the cache directory.",
            "Wait for it to end and run again, or use another --cache-dir.",
        ),
    }


class GitError(SparkwrightError):
    """git failed."""

    references: ClassVar[Mapping[str, Advice]] = {
        "git-failed": Advice(
            "git refused a command; the object store in the cache directory may be damaged.",
            "Read git's message above. After objects.git and mirrors are removed from the "
            "cache directory, the next run fetches again.",
        ),
    }


class PythonError(SparkwrightError):
    """A Python environment cannot be used."""

    references: ClassVar[Mapping[str, Advice]] = {
        "environment-unusable": Advice(
            "The folder is no Python environment that this user may change, or it holds other "
            "releases of what is to be installed.",
            "Name another Python with --python, or another folder of installations with --prefix.",
        ),
    }


class WheelError(SparkwrightError):
    """A wheel is damaged, unsafe, or differs from its record."""

    references: ClassVar[Mapping[str, Advice]] = {
        "wheel-invalid": Advice(
            "The wheel is damaged or is not what its name says; its RECORD and its members "
            "disagree.",
            "Build or fetch it again. If `install` refuses it, use the index's own address, and "
            "tell its publisher.",
        ),
        "wheel-mismatch": Advice(
            "What the wheel says of itself inside (METADATA, WHEEL, RECORD, its SBOM) is not "
            "what its file name or its bytes say.",
            "Build it again; do not rename wheels or edit them by hand.",
        ),
        "wheel-unsafe": Advice(
            "The archive holds a name that leaves its folder, a duplicate name, a link, or "
            "more than it states.",
            "Do not install it by other means. Report it to whoever made it.",
        ),
    }

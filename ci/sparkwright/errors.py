"""
Every failure that a user can meet.

Each subclass of `SparkwrightError` has a stable kebab-case *reference*, and says three things: what failed (given by the
code that raises it), what that usually means, and what to do. The exit codes are those of DESIGN §6: 1 for an expected
failure, 2 for wrong usage; 3 and 130 are given by `sparkwright.cli.main` to faults of ours and to an interruption.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar


class SparkwrightError(Exception):
    """
    An expected failure.

    Args:
        what: What failed, in one sentence that names the thing.
        details: Further lines, such as both hashes of a mismatch or the last lines of a failed command.
        todo: What to do, where the raising code knows better than the class.
        data: The same as *details* for programs, record by name.
    """

    reference: ClassVar[str]
    means: ClassVar[str]
    todo: str = ""
    exit_code: ClassVar[int] = 1

    def __init__(self, what: str, *, details: Sequence[str] = (), todo: str = "", data: Mapping[str, object] | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.details = tuple(details)
        self.data = dict(data or {})
        self.todo = todo or type(self).todo

    def document(self) -> dict[str, object]:
        """Return the failure as the JSON object that ``--json`` prints."""
        return {
            "reference": self.reference,
            "what": self.what,
            "means": self.means,
            "todo": self.todo,
            "details": list(self.details),
            **self.data,
        }


class UsageError(SparkwrightError):
    reference = "usage"
    means = "The command line asks for something that does not exist."
    todo = "See sparkwright --help."
    exit_code = 2


class FileInvalid(SparkwrightError):
    reference = "file-invalid"
    means = "A reviewed file has a typo, a duplicate key, a missing field, or a value of the wrong type (unquoted digits, say)."
    todo = "Mend the file at the place named above; strings that consist of digits need quotes."


class SourceMismatch(SparkwrightError):
    reference = "source-mismatch"
    means = "The bytes that arrived are not the bytes that the lock names: a replaced release, a broken mirror, or tampering."
    todo = "Do not build from it. Compare both values with the upstream project; change the lock only by `sparkwright lock`."


class SourceUnreachable(SparkwrightError):
    reference = "source-unreachable"
    means = "The network, the index or the mirror does not offer what the lock names."
    todo = "Check the connection with `sparkwright doctor`, or give a mirror with --mirror URL=REPLACEMENT. What arrived so far is kept."


class MirrorDamaged(SparkwrightError):
    reference = "mirror-damaged"
    means = "A file of the upstream's copy in the cache directory was lost or changed: a disk with faults, or somebody's clearing up."
    todo = "Remove the mirror's folder; the next run fetches it again."


class SourceUnresolved(SparkwrightError):
    reference = "source-unresolved"
    means = "The lock holds no full commit for this source, because the host could not be reached when it was written."
    todo = "Run `sparkwright lock` where the upstream host is reachable, or build from another kind of source with --source."


class Offline(SparkwrightError):
    reference = "offline"
    means = "The step needs something that is not in the store, and --offline forbids fetching it."
    todo = "Run `sparkwright fetch` once with a connection."


class GitHubUnreachable(SparkwrightError):
    reference = "github-unreachable"
    means = "The network or a proxy keeps this machine from GitHub, a login page answers in its place, or GitHub has a fault."
    todo = "Check the connection with `sparkwright doctor` and try again, or give a mirror with --mirror https://api.github.com=REPLACEMENT."


class GitHubRefused(SparkwrightError):
    reference = "github-refused"
    means = "The token in GITHUB_TOKEN or GH_TOKEN is wrong or has ended, or it may not read this repository."
    todo = "Renew the token, or give it the right to read; a public repository can be asked without any, so unsetting both does as well."


class GitHubLimited(SparkwrightError):
    reference = "github-limited"
    means = "GitHub answers only so many questions an hour; without a token, everybody behind the same address shares a small number."
    todo = "Wait until the limit ends, or set GITHUB_TOKEN to a token, which needs no rights for public repositories and raises the limit."


class PullRequestGone(SparkwrightError):
    reference = "pull-request-gone"
    means = "The pull request was deleted or never existed, or its repository is private, renamed or gone."
    todo = "Compare number and repository with the ledger. What was deleted may still be in a mirror, by the commit that the ledger names."


class SourceUnlocked(SparkwrightError):
    reference = "source-unlocked"
    means = "The build would download something whose bytes the lock does not pin, or another state of it than the lock names."
    todo = "Run `sparkwright lock`; what the build does not reach goes under `ignored` in stack.yaml, with the reason."


class DeclarationUnsafe(SparkwrightError):
    reference = "declaration-unsafe"
    means = "A file of the tree names a source in a way that no project needs: an option or a program as its address, or two at once."
    todo = "Do not fetch it by other means. Look at the file, and at who changed it, with the upstream project."


class ArchiveUnsafe(SparkwrightError):
    reference = "archive-unsafe"
    means = "The archive has a member that would land outside its folder, a link that leaves it, or more than it admits to."
    todo = "Do not unpack it by other means. Report it to the project that published it."


class DiskFull(SparkwrightError):
    reference = "disk-full"
    means = "The file system of the cache directory has no room for the next file."
    todo = "Make room, or choose another place with --cache-dir. Nothing finished is lost; the next run goes on from here."


class CacheUnusable(SparkwrightError):
    reference = "cache-unusable"
    means = "The cache directory is a file, or cannot be made or written by this user."
    todo = "Choose another place with --cache-dir or SPARKWRIGHT_CACHE_DIR, or mend its permissions."


class StoreBusy(SparkwrightError):
    reference = "store-busy"
    means = "Another sparkwright works on the same thing in the same cache directory."
    todo = "Wait for it to end, or use another --cache-dir."


class PatchInvalid(SparkwrightError):
    reference = "patch-invalid"
    means = "A patch file cannot be read as one, or its header lacks a trailer that says why it exists and until when."
    todo = "Export it again, or add the missing trailer."


class PatchConflict(SparkwrightError):
    reference = "patch-conflict"
    means = "The pinned source differs from the one that the patch was made for; no fuzz and no 3-way merge are used here."
    todo = "Read the report above; then make the patch anew: `sparkwright rebase`, and `sparkwright export` when it applies."


class PatchNoEffect(SparkwrightError):
    reference = "patch-no-effect"
    means = "The patch leaves the tree as it was: upstream has it already, or an earlier patch does the same."
    todo = "Drop the patch, and say in the changelog which upstream release took it."


class PatchUpstream(SparkwrightError):
    reference = "patch-already-upstream"
    means = "The base has this change already, so the patch has nothing left to do: upstream took it, or an earlier patch does the same."
    todo = "Drop it, naming the upstream commit or release: remove the stack from the ledger's record, or the file from the series."


class BisectUndecided(SparkwrightError):
    reference = "bisect-undecided"
    means = "The patch is the same at both ends of the search, so nothing between them can be named as the turn."
    todo = "Choose other ends with --from and --to."


class PatchLost(SparkwrightError):
    reference = "patch-lost"
    means = "The worktree has no commit for a patch of the series: it was dropped while rebasing, perhaps by git itself and without a word."
    todo = "If it is to go, say so with --drop NAME; if not, put its commit back in the worktree."


class RebaseUnfinished(SparkwrightError):
    reference = "rebase-unfinished"
    means = "A rebase is under way in the worktree: a patch conflicts and waits for you, or changes are not committed."
    todo = "Finish it with git in the worktree (git am --continue), then `sparkwright export`; or give it up: `sparkwright rebase --abort`."


class ExportMismatch(SparkwrightError):
    reference = "export-mismatch"
    means = "The files of the series are not what its commits give: edited by hand, or made by another tool."
    todo = "Run `sparkwright export`, read the difference that it makes, and commit it."


class PickMismatch(SparkwrightError):
    reference = "pick-mismatch"
    means = "The ledger's record and the pull request disagree: edited by hand, a replaced repository, or a record that was never pinned."
    todo = "Do not build from it. Compare with the pull request, then run `sparkwright pick` for it."


class PickMoved(SparkwrightError):
    reference = "pick-moved"
    means = "The author pushed to the pull request, perhaps with force. What stacks carry is still the pinned state."
    todo = "Read the difference above. Take the new state with `sparkwright pick NUMBER --accept`, or leave everything as it is."


class RuleMismatch(SparkwrightError):
    reference = "rule-mismatch"
    means = "Upstream moved or reworded the lines that the rule was written for."
    todo = "Read the file at the places listed, then adapt the rule and its expected number of sites."


class ArchMismatch(SparkwrightError):
    reference = "arch-mismatch"
    means = "CMake folded or dropped the requested architecture for these units; the wheel would not hold the asked-for machine code."
    todo = "Apply the rule named beside each unit, or list the unit under `kept` with a reason."


class ArchTrap(SparkwrightError):
    reference = "arch-trap"
    means = "The tree holds code that compiles for the requested architecture, and that fails when it runs there."
    todo = "Do what the guard in archs.yaml says. Do not lift it: no configure and no audit would show what it sees."


class ToolMissing(SparkwrightError):
    reference = "tool-missing"
    means = "A program that the step runs is not installed on this machine."
    todo = "Install it as `sparkwright doctor` says."


class CommandFailed(SparkwrightError):
    reference = "command-failed"
    means = "A program that was started by sparkwright ended with an error of its own."
    todo = "Read its last lines above; the full log is named there."


class ConfigureFailed(CommandFailed):
    reference = "configure-failed"
    means = "CMake could not configure the patched tree: a tool is missing, or the tree wants something that the lock does not name."


class CompileFailed(CommandFailed):
    reference = "compile-failed"
    means = "The compiler refused a unit, or was killed for memory. Units compiled so far are kept."
    todo = "Read the compiler's lines above. If it was killed, run again with fewer --jobs or a smaller --memory."


class BuildDownloads(CommandFailed):
    reference = "build-downloads"
    means = "A build program wanted a source that the lock does not name; what it fetches today may be another file tomorrow."
    todo = "Lock that source (`vendored` in stack.yaml, then `sparkwright lock`), or switch off the part of the build that wants it."


class IsolationMissing(SparkwrightError):
    reference = "isolation-missing"
    means = "The system forbids its users namespaces of their own, as Ubuntu 24.04 and most containers do."
    todo = (
        "Build in a container (sparkwright build --container), or as root, or allow namespaces: "
        "sudo sysctl kernel.apparmor_restrict_unprivileged_userns=0"
    )


class BuildFailed(CommandFailed):
    reference = "build-failed"
    means = "The upstream's own build backend ended with an error."


class WheelInvalid(SparkwrightError):
    reference = "wheel-invalid"
    means = "The wheel is damaged or is not what its name says; its RECORD and its members disagree."
    todo = "Remove it and fetch or build it again."


class BaseMismatch(SparkwrightError):
    reference = "base-mismatch"
    means = "The official wheel was not built from the locked source, so a graft onto it would mix two releases."
    todo = "Check that stack.yaml names the same version for the source and for the base wheel, then run `sparkwright lock`."


class TargetMismatch(SparkwrightError):
    reference = "target-mismatch"
    means = "What was compiled here is not for the machine of the wheel, or asks that machine for more than the official library does."
    todo = "Do not install the wheel. Look for the library or header of this machine that got into the build for the other one."


class RequirementMismatch(SparkwrightError):
    reference = "requirement-mismatch"
    means = "The official wheel does not require what environment.yaml would change, or requires just that already."
    todo = "Read the wheel's requirements, then correct or remove the entry under `requires` in environment.yaml."


class AuditFailed(SparkwrightError):
    reference = "audit-failed"
    means = "The machine code inside the wheel is not what the policy in ci/audit.yaml asks for."
    todo = "Do not publish the wheel. Compare the findings with the plan of the same build."


class OnsiteMismatch(SparkwrightError):
    reference = "onsite-mismatch"
    means = "A file was changed by hand or by another tool, so an edit made for the pinned wheel would be a guess. Nothing was changed."
    todo = "Look at the files named above. `sparkwright install --restore` puts the originals back; then install again without it."


class EnvironmentUnusable(SparkwrightError):
    reference = "environment-unusable"
    means = "The folder is no Python environment that this user may change, or it holds other releases of what is to be installed."
    todo = "Name a virtual environment of your own with --into, such as `uv venv` makes."


class NotProvided(SparkwrightError):
    reference = "not-provided"
    means = "The stack has no such fork, source or base for this machine."
    todo = "See forks/<stack>/stack.yaml for what there is."


ALL: tuple[type[SparkwrightError], ...] = tuple(
    sorted(
        (
            value
            for value in list(globals().values())
            if isinstance(value, type) and issubclass(value, SparkwrightError) and value is not SparkwrightError
        ),
        key=lambda kind: kind.reference,
    )
)

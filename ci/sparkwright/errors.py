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
    means = "The file system of the cache directory, or that of the output, has no room for what is to be written next."
    todo = "Make room, or choose another place with --cache-dir. Nothing finished is lost; the next run goes on from here."


class OutputUnwritable(SparkwrightError):
    reference = "output-unwritable"
    means = "Standard output or standard error leads to a file that may not grow, or to a device or network that is gone."
    todo = "Send the output elsewhere, and run it again. Nothing finished is lost."


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
    means = "Both ends of the search answer the same, or one state does not answer the same every time: no turn can be named for certain."
    todo = "Choose other ends with --from and --to."


class PredicateFailed(SparkwrightError):
    reference = "predicate-failed"
    means = "The command of a search was killed or broke down, so what it said about this state is no answer."
    todo = "Run it by hand, with the variables that the log names; exit with 125 where a state cannot be judged. Known answers are kept."


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


class EarlyCheckFailed(SparkwrightError):
    reference = "early-check-failed"
    means = "The build would fail, and this is known before a minute is spent on it. All that was found is listed, not the first alone."
    todo = "Mend every line above, then run again."


class CompilerTooOld(ConfigureFailed):
    reference = "compiler-too-old"
    means = "A source that the build compiles uses a C++ library or language that this machine's host compiler does not have."
    todo = (
        "Install a newer one beside it (sudo apt-get install g++-13) and name it: CXX=g++-13 CC=gcc-13 CUDAHOSTCXX=g++-13. "
        "A graft compiles none of these sources: leave --full out."
    )


class ExtensionMissing(CommandFailed):
    reference = "extension-missing"
    means = "Upstream marks the library as optional, so that its build goes on without it; whoever installs the wheel would miss it later."
    todo = "Read the compiler's lines above, or, where the stack does without the library, take it out of `extensions` in environment.yaml."


class CompilerCrashed(CompileFailed):
    reference = "compiler-crashed"
    means = "A fault of the compiler itself, or the kernel ended it for want of memory; the source may be right."
    todo = "Run `sparkwright build --only UNIT` for it alone. By signal 9 the kernel asks for more memory; report another one to its maker."


class CompilerHung(CompileFailed):
    reference = "compiler-hung"
    means = "The compiler waits for something that does not come: a file system that does not answer, or a fault of its own."
    todo = "Run it alone with `sparkwright build --only UNIT`. Where it is only slow, raise --unit-timeout."


class MemoryTooSmall(SparkwrightError):
    reference = "memory-too-small"
    means = "The compiler of one unit alone holds more than the build may have, or than is free on this machine."
    todo = "Raise --memory, close other programs, or add swap; a stack without this unit needs less."


class MemoryExceeded(SparkwrightError):
    reference = "memory-exceeded"
    means = "A unit of unknown size ran alone and still came to the limit. It was ended before the machine could swap or stop answering."
    todo = "Raise --memory, close other programs, or add swap. What was compiled is kept, and the unit's size is now known."


class ModuleUnknown(SparkwrightError):
    reference = "module-unknown"
    means = "aot.yaml asks FlashInfer for a module that the locked release does not make: a typo, or another release renamed it."
    todo = "Correct `call` and `arguments` in build/<stack>/aot.yaml."


class ModuleArch(SparkwrightError):
    reference = "module-arch"
    means = "FlashInfer compiles some modules for an architecture of its own choice, whatever it is asked for."
    todo = "If such code runs on the stack's device, say so under `arch` of the entry in aot.yaml, with the reason; else remove the entry."


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


class InputsDiffer(SparkwrightError):
    reference = "inputs-differ"
    means = "This checkout would build something else: the reviewed files named above are not those that the wheel was made from."
    todo = "Check out the commit that the wheel was made from, with its stack, or build the wheel anew here."


class RebuildDiffers(SparkwrightError):
    reference = "rebuild-differs"
    means = "The same inputs gave other code or other files: an unpinned tool, a build that looks at its surroundings, or tampering."
    todo = "Look at the members and kernels named above. Publish neither wheel before the reason is known."


class OnsiteMismatch(SparkwrightError):
    reference = "onsite-mismatch"
    means = "A file was changed by hand or by another tool, so an edit made for the pinned wheel would be a guess. Nothing was changed."
    todo = "Look at the files named above. `sparkwright install --restore` puts the originals back; then install again without it."


class EnvironmentUnusable(SparkwrightError):
    reference = "environment-unusable"
    means = "The folder is no Python environment that this user may change, or it holds other releases of what is to be installed."
    todo = "Name a virtual environment of your own with --into, such as `uv venv` makes."


class EngineMissing(SparkwrightError):
    reference = "engine-missing"
    means = "No container engine is installed on this machine, or it is not running."
    todo = "Install one (sudo apt-get install docker.io) or start it (sudo systemctl start docker); or build without --container."


class EngineUnreachable(SparkwrightError):
    reference = "engine-unreachable"
    means = "The container engine's socket is there, but the engine behind it was stopped, hangs, or ended while it worked for us."
    todo = "Start it again (sudo systemctl restart docker) and read its log (journalctl -u docker). What is finished is kept."


class EngineForbidden(SparkwrightError):
    reference = "engine-forbidden"
    means = "The container engine's socket belongs to another user or group; whoever may open it has the rights of root."
    todo = "Join its group (sudo usermod -aG docker $USER, then log in again), or set up a rootless engine (dockerd-rootless-setuptool.sh)."


class EngineRefused(SparkwrightError):
    reference = "engine-refused"
    means = "The container engine could not do what it was asked for; its own words are above."
    todo = "Read them; the engine's log says more (journalctl -u docker)."


class EmulationMissing(SparkwrightError):
    reference = "emulation-missing"
    means = "The image holds programs of another architecture, and this machine has nothing that runs them."
    todo = "Install the emulator: sudo apt-get install qemu-user-static binfmt-support; or work on a machine of that architecture."


class BaseUnresolved(SparkwrightError):
    reference = "base-unresolved"
    means = "The base image is not named by its digest, so nobody could say what the build ran in: a tag means another image tomorrow."
    todo = (
        "Give the digest with --base NAME@sha256:…, or the id of an image that the engine has (docker image ls --no-trunc), "
        "or write it as `image` into build/<stack>/environment.yaml."
    )


class ImageMismatch(SparkwrightError):
    reference = "image-mismatch"
    means = "The digest names an image of one architecture, and the build was asked for in another."
    todo = "Name an image of that architecture with --base, or change --platform."


class ImageBuildFailed(SparkwrightError):
    reference = "image-build-failed"
    means = "The base has no package that the builder needs and could not install it, or its Python is older than 3.11."
    todo = (
        "Read the last lines above. With --offline the base must have everything that the Dockerfile lists: "
        "build/builder.Dockerfile, or build/serve.Dockerfile for `image`."
    )


class ContainerKilled(SparkwrightError):
    reference = "container-killed"
    means = "The container ended without a word of the program in it: it took more memory than its limit, or somebody removed it."
    todo = "Run again with a larger --memory or fewer --jobs; what is finished is kept."


class GateFailed(SparkwrightError):
    reference = "gate-failed"
    means = "A rung saw something wrong in the wheel, the source tree or the server; the checks that failed are above, with samples."
    todo = "Do not install or publish it. The reason of each failed check is in docs/gates.md; `sparkwright gate --json` holds all samples."


class GateInconclusive(SparkwrightError):
    reference = "gate-inconclusive"
    means = "What was measured decides neither way: too few samples, or a machine whose own noise is as large as the margin."
    todo = "Measure more (see the check's figures), on an idle machine. Until then this wheel may only be published as a candidate."


class MeasurementInvalid(SparkwrightError):
    reference = "measurement-invalid"
    means = "What was measured does not count: a half stream, another model, a reference that does not agree with itself."
    todo = "Mend what the checks name, and run the rung again. An invalid measurement says nothing about the wheel."


class GateNotRun(SparkwrightError):
    reference = "gate-not-run"
    means = "Nothing failed, but a rung or one of its rows could not run here, so this is not a pass."
    todo = "Run those rungs where they can run, or ask for the others alone with --rung; each row says what it needs."


class CheckpointInvalid(SparkwrightError):
    reference = "checkpoint-invalid"
    means = "A file of the model is cut off, was made by a program that is wrong, or was made to mislead."
    todo = "Fetch the model again and compare its hashes with those that its publisher states; do not load it."


class ModulesUnexpected(SparkwrightError):
    reference = "modules-unexpected"
    means = "Weights of the model are not as its own quantisation config says: it is slower than its format, or it is read wrongly."
    todo = "Look at the modules named above. Ask the model's publisher for a checkpoint that agrees with its config."


class RecipeUnfit(SparkwrightError):
    reference = "recipe-unfit"
    means = (
        "The recipe says nothing of this release of vLLM, or of its official wheel; memory and checkpoint here are not as it plans; or no "
        "floor is known for its model."
    )
    todo = "Choose a release that it names, or change the recipe once somebody has read that release's flags (ci/recipes/README.md)."


class ManifestInvalid(SparkwrightError):
    reference = "manifest-invalid"
    means = "What the index serves as its manifest is no manifest: a login page, an error page, a cut-off or hand-edited file."
    todo = "Open the address above in a browser. If the index itself is damaged, its publisher makes it again: `sparkwright refresh`."


class ManifestExpired(SparkwrightError):
    reference = "manifest-expired"
    means = "Nobody has signed this index for too long: its publisher stopped, or somebody keeps you from newer manifests."
    todo = "Compare with the index at its own address. What is installed keeps working; install nothing from here until it is signed anew."


class ManifestReplayed(SparkwrightError):
    reference = "manifest-replayed"
    means = "This machine has seen a newer manifest of the same index: a mirror lags behind, or somebody serves you an old one."
    todo = "Use the index's own address, or wait for the mirror. Do not delete the record of what was seen unless you know why it is wrong."


class ManifestForked(SparkwrightError):
    reference = "manifest-forked"
    means = "Two manifests with the same serial differ: two publishers worked at once, or the key is in other hands."
    todo = "Install nothing from here. Tell the publisher both digests above."


class ManifestElsewhere(SparkwrightError):
    reference = "manifest-elsewhere"
    means = "The manifest was signed for another address than the one it was asked from."
    todo = "If this is a mirror that you trust to be reachable (it needs no other trust), name the signed address with --signed-for."


class ClockWrong(SparkwrightError):
    reference = "clock-wrong"
    means = "The index was signed more than a day after this machine's present time; by that clock nothing would ever expire."
    todo = "Set the clock (timedatectl), and run again."


class StateUnusable(SparkwrightError):
    reference = "state-unusable"
    means = "The record of which manifests this machine has seen is damaged, of somebody else, or on a full or read-only disk."
    todo = "Mend its folder's permissions. Delete the file named above only if you know why it is wrong: it keeps old manifests away."


class SignatureInvalid(SparkwrightError):
    reference = "signature-invalid"
    means = "The bytes are not the ones that were signed: changed, mixed up or cut off on the way."
    todo = "Try the index's own address. If it serves the same, tell its publisher, and install nothing from it."


class SignerUnknown(SparkwrightError):
    reference = "signer-unknown"
    means = "Somebody signed this, but no key or identity that this machine trusts for the index."
    todo = "Compare the signer above with what the publisher says elsewhere; name the right key with --key, or do not install."


class IdentityUnusable(SparkwrightError):
    reference = "identity-unusable"
    means = "There is no identity token to sign with, it has run out, or the services that vouch for it and log it did not answer."
    todo = "In a workflow, give it the right to ask for a token (id-token: write) and run again; elsewhere sign with a key."


class TrustMissing(SparkwrightError):
    reference = "trust-missing"
    means = "Nothing says whose signature counts for this index, so nothing of it can be believed."
    todo = "Name the publisher's key with --key FILE, having compared its fingerprint with what the publisher says elsewhere."


class KeyInvalid(SparkwrightError):
    reference = "key-invalid"
    means = "The file is no Ed25519 key of the kind needed here, others may read it, or its passphrase is wrong."
    todo = "Make one with `sparkwright key FILE`; a private key belongs to its owner alone (chmod 600)."


class EvidenceInvalid(SparkwrightError):
    reference = "evidence-invalid"
    means = "A statement about a wheel is missing, of another kind, about other bytes, or does not agree with the statements beside it."
    todo = "Do not install the wheel. Tell the publisher which statement it was; `sparkwright evidence` shows them one by one."


class VerdictForeign(SparkwrightError):
    reference = "verdict-foreign"
    means = "The verdicts are about other bytes than the wheel: an earlier build, or files that were mixed up."
    todo = "Run `sparkwright gate` with this very wheel."


class VerdictHollow(SparkwrightError):
    reference = "verdict-hollow"
    means = "A pass has nothing behind it: checks are missing that the rung makes, or no figure, sample or leg was recorded."
    todo = "Run the gate again, whole; do not edit what it wrote. The lines above name what is missing."


class VerifiedRefused(SparkwrightError):
    reference = "verified-refused"
    means = "Not every required verdict about these bytes is a pass; the lines above say which, and why."
    todo = "Run what is missing on a Spark (`sparkwright gate`), or publish to the channel candidate, where all of this is shown."


class WheelNameTaken(SparkwrightError):
    reference = "wheel-name-taken"
    means = "The index holds, or once held, other bytes under this file name. Names are never used twice: caches and locks rely on it."
    todo = "Raise `label` in the stack's stack.yaml and build again; a fix is a new version."


class WheelMismatch(SparkwrightError):
    reference = "wheel-mismatch"
    means = "What the wheel says of itself inside (METADATA, WHEEL, RECORD, its SBOM) is not what its file name or its bytes say."
    todo = "Build it again; do not rename wheels or edit them by hand."


class WheelUnsafe(SparkwrightError):
    reference = "wheel-unsafe"
    means = "The archive holds a name that leaves its folder, twice the same name, a link, or more than it admits to."
    todo = "Do not install it by other means. Report it to whoever made it."


class VersionOrder(SparkwrightError):
    reference = "version-order"
    means = "pip and uv take the highest version, and this one sorts before one that is offered already, so nobody would get it."
    todo = "Raise `label` in stack.yaml (spark.2026.11 to spark.2026.11.1) and build again, or yank the other release."


class SetUnresolved(SparkwrightError):
    reference = "set-unresolved"
    means = "No set of versions satisfies all requirements of these wheels on the package index that was asked."
    todo = "Read uv's explanation above. A version that the index lacks is replaced under `overrides` in ci/release.yaml."


class LockInvalid(SparkwrightError):
    reference = "lock-invalid"
    means = "The lock of a set is no pylock.toml of wheels with sha256 hashes, or it names a file that would leave its folder."
    todo = "Do not install from it. Use the index's own address; if that serves the same, tell its publisher."


class SetMixed(SparkwrightError):
    reference = "set-mixed"
    means = "The lock names another wheel, another index or another version than the release it belongs to: two releases were mixed."
    todo = "Do not install it. Use the index's own address; if that serves the same, tell its publisher."


class ReleaseUnknown(SparkwrightError):
    reference = "release-unknown"
    means = "The index has no release of that name, stack, channel or machine."
    todo = "See `sparkwright install --list` for what there is."


class ReleaseYanked(SparkwrightError):
    reference = "release-yanked"
    means = "All that fits was yanked: its publisher says that it should not be installed, and why."
    todo = "Choose another; to have this one nevertheless, name it whole (`--version NAME`)."


class ReleaseUnproved(SparkwrightError):
    reference = "release-unproved"
    means = "The release is a candidate: not everything that `verified` asks for was shown. The lines above say what is missing."
    todo = "Take it knowingly with `--channel candidate`, or choose a release of the channel verified."


class ReleaseNameTaken(SparkwrightError):
    reference = "release-name-taken"
    means = "The index holds this very release already, or once held another under its name; both stay as they are."
    todo = "Publish under the next number; see `sparkwright install --list` for what there is."


class IndexMissing(SparkwrightError):
    reference = "index-missing"
    means = "There is no index of sparkwright at this place, or nothing says where it is."
    todo = "Name it with --index URL (or --at FOLDER for its publisher); `publish` makes one where there is none."


class IndexBusy(SparkwrightError):
    reference = "index-busy"
    means = "Another publisher works on this index right now."
    todo = "Wait for it to end and run again; nothing was changed."


class IndexMoved(SparkwrightError):
    reference = "index-moved"
    means = "The index changed while this publication was prepared, so that what was decided may no longer hold."
    todo = "Run the same command again; files that are there already are not sent twice."


class IndexDamaged(SparkwrightError):
    reference = "index-damaged"
    means = "A file of the index is missing, or not the one that its manifest names: a faulty disk, a half-copied folder, a wrong hand."
    todo = "Restore it from a copy, or publish it again from the same wheels. Clients refuse it until then."


class PublishFailed(SparkwrightError):
    reference = "publish-failed"
    means = "The host did not keep what it was sent: another size, other bytes, a draft that changed, or a file above its limit."
    todo = "Run the same command again; what arrived whole is kept. The index does not point at any of it yet."


class ReleaseMutable(SparkwrightError):
    reference = "release-mutable"
    means = "The host would let somebody replace published files: releases of this repository are not immutable."
    todo = "Switch on immutable releases in the repository's settings, and run again."


class DownloadInvalid(SparkwrightError):
    reference = "download-invalid"
    means = "The bytes that arrived are not those that the signed manifest names: a proxy that truncates, a damaged mirror, or tampering."
    todo = "Try again, or use the index's own address. What arrived was not kept and nothing was installed."


class EnvironmentForeign(SparkwrightError):
    reference = "environment-foreign"
    means = "The environment holds another build of a package of the matched set (torch, most often), which something else may rely on."
    todo = "Install into a new environment (python3 -m venv), or let it be replaced with --replace."


class EnvironmentBroken(SparkwrightError):
    reference = "environment-broken"
    means = "Something else changed the installed set: pip or uv replaced, removed or edited a package of it."
    todo = "Run the same `sparkwright install` again with --repair; it puts back exactly what is listed above."


class NothingInstalled(SparkwrightError):
    reference = "nothing-installed"
    means = "The environment holds no set that sparkwright installed, or none before the present one."
    todo = "See `sparkwright install --list`, and name an environment with --into."


class NightTaken(SparkwrightError):
    reference = "night-taken"
    means = "A record of that day, stack and run is there already, and says something else: two jobs of one run record the same stack."
    todo = "Record each stack of a run once; the record that is there stays as it is."


class RecordDamaged(SparkwrightError):
    reference = "record-damaged"
    means = "A record of a night, of drift or of a status is no such record, is cut off, or has another name than it gives itself."
    todo = "Take it from the artifacts of the run that made it, or remove it; the site shows it as damaged until then."


class SitePartial(SparkwrightError):
    reference = "site-partial"
    means = "The site was made, and shows that some records are damaged, missing or not to be believed."
    todo = "Mend or restore what is listed above, and run again; without --strict the site is taken as it is."


class ModelMissing(SparkwrightError):
    reference = "model-missing"
    means = "The folder holds no model, or the model is not whole in the cache of models on this machine."
    todo = "Name the folder with --model, fetch the model (`hf download`), or let vLLM fetch it with --download."


class ServeRunning(SparkwrightError):
    reference = "serve-running"
    means = "`sparkwright serve` runs here already, and two servers would take each other's memory: a Spark has one for everything."
    todo = "Ask the server that runs, or stop it first (`kill PID`, or Ctrl-C where it was started)."


class PortTaken(SparkwrightError):
    reference = "port-taken"
    means = "Another program listens on that address and port, or this user may not."
    todo = "End that program, or choose another port with --port (in a container: PORT)."


class MemoryHeld(SparkwrightError):
    reference = "memory-held"
    means = "The machine is large enough, but programs that run now hold so much that the server would not fit beside them."
    todo = "End what is listed above, or plan less (--kv-cache-memory-bytes, --max-num-seqs)."


class MemoryLow(SparkwrightError):
    reference = "memory-low"
    means = "The machine's free memory fell below its floor; a Spark that runs out of memory stops answering, and was spared that."
    todo = "End other programs or plan less cache; `--floor` lowers the floor for those who know what they risk."


class GraphMemoryNegative(SparkwrightError):
    reference = "graph-memory-negative"
    means = "vLLM estimated less than nothing for its CUDA graphs, so it would plan more cache than there is memory (vllm #44740)."
    todo = "Pin the cache with --flag=--kv-cache-memory-bytes=BYTES, or use a recipe, whose plan does."


class ServerDied(SparkwrightError):
    reference = "server-died"
    means = "vLLM ended by itself. Its last lines are above; the first error is further up in its log."
    todo = "Read the log from the first line with ERROR on."


class ServerLate(SparkwrightError):
    reference = "server-late"
    means = "The server was not ready within its patience: a slow disk, a first compilation, or it hangs."
    todo = "Read its log; give it longer with --patience SECONDS."


class ServerDead(SparkwrightError):
    reference = "server-dead"
    means = "Nothing serves there: no process, no listener, or an engine that says itself that it is dead."
    todo = "Start it again with `sparkwright serve`; the log of the one that died says why."


class ServerStuck(SparkwrightError):
    reference = "server-stuck"
    means = "The server takes connections, gives no token, and none of its counters moves: it hangs, although /health may say 200."
    todo = "Ask again; if it stays so, stop it and start it again, and keep its log."


class NodeLost(SparkwrightError):
    reference = "node-lost"
    means = "Ray knows fewer living machines than the server was started on; vLLM's own /health still says 200 for minutes."
    todo = "Look at the other machine; then start its `serve --ray-worker` and the server again."


class VariableRefused(SparkwrightError):
    reference = "variable-refused"
    means = "A variable has a value that it cannot have, or a name that nobody reads, so the server would run otherwise than was asked."
    todo = "Correct it as the lines above say, or take it away; `sparkwright serve --table` lists the variables."


class FlagUnknown(SparkwrightError):
    reference = "flag-unknown"
    means = "The installed release of vLLM does not know the flag, or it is one that `serve` sets itself."
    todo = "Correct it, or take it away; `vllm serve --help=all` of that environment lists its flags."


class RayMissing(SparkwrightError):
    reference = "ray-missing"
    means = "vLLM serves over several machines through Ray, which the environment does not have."
    todo = "Install it there (`uv pip install --python VENV/bin/python ray`), the same version on every machine."


class RayFailed(SparkwrightError):
    reference = "ray-failed"
    means = "Ray did not start, or ended by itself: a wrong address, a port that is taken, another version on the other machine."
    todo = "Read the lines above; ADDRESS is HOST:PORT of the head, as it prints it."


class WorkersMissing(SparkwrightError):
    reference = "workers-missing"
    means = "Fewer machines than the recipe needs joined within the patience."
    todo = "Start `sparkwright serve --ray-worker ADDRESS` on each of the others; see that both networks let them through."


class RunnerSetup(SparkwrightError):
    reference = "runner-setup"
    means = "A step of making this machine a runner did not succeed: no root, no room, or something of that name is there already."
    todo = "Read the lines above, and run the same command again; steps that are done are not done twice."


class RunnerUnfit(SparkwrightError):
    reference = "runner-unfit"
    means = "The machine is not, or no longer, as set-up leaves it; what a job could do there was not reviewed."
    todo = "Run `sparkwright runner setup` again; what only a person can mend is said above."


class RunnerExposed(SparkwrightError):
    reference = "runner-exposed"
    means = "Somebody without write access to the repository could run a program on this machine."
    todo = "Keep the machine's labels to workflows started by schedule, push or workflow_dispatch, best in a private repository."


class RunnerBusy(SparkwrightError):
    reference = "runner-busy"
    means = "Another run of `runner once`, or the leader of a pair, has this machine now."
    todo = "Wait for it to end; a machine has one GPU and does one job at a time."


class RunnerUnready(SparkwrightError):
    reference = "runner-unready"
    means = "The machine is not in the state that a job begins in: too little disk or memory, or something else uses the GPU."
    todo = "Free what is named above; the unit tries again by itself. No job was taken, so none is lost."


class RunnerUnclean(SparkwrightError):
    reference = "runner-unclean"
    means = "Something that a job left does not go away: a process that waits for a device, a file system mounted in the work folder."
    todo = "No job is taken before it is gone; restarting the machine ends every such process."


class RunnerUnregistered(SparkwrightError):
    reference = "runner-unregistered"
    means = "GitHub gave this machine no configuration: no network, a token that expired or may not, or labels that GitHub refuses."
    todo = "Read what GitHub said above. The unit asks again by itself; no job was taken."


class RunnerDied(SparkwrightError):
    reference = "runner-died"
    means = "GitHub's runner ended in the middle of a job, or before it had taken one: it was killed, or lost GitHub for too long."
    todo = "Look at its log, named above. GitHub gives the job up after some minutes; start it again there. The machine was cleaned."


class RunnerDisk(SparkwrightError):
    reference = "runner-disk"
    means = "The job filled its work folder, or something filled the machine's disk; it was ended before anything else failed."
    todo = "Look at what the job writes, or raise room.work in ci/runner.yaml and set up anew. The machine was cleaned."


class RunnerMemory(SparkwrightError):
    reference = "runner-memory"
    means = "Unified memory was nearly gone, which takes the whole machine with it; the job was ended first."
    todo = "Give the job's server less memory. The machine was cleaned."


class RunnerOvertime(SparkwrightError):
    reference = "runner-overtime"
    means = "The job ran longer than ci/runner.yaml lets one."
    todo = "Give the job a timeout-minutes of its own below limits.job, or raise that. The machine was cleaned."


class RunnerRefused(SparkwrightError):
    reference = "runner-refused"
    means = "The job is of another repository, event or branch than those that may use this machine."
    todo = "Nothing of it ran. If it should have run, look at events and refs in ci/runner.yaml."


class LeaseRefused(SparkwrightError):
    reference = "lease-refused"
    means = "The other Spark of the pair could not be reached, or was not free in time, so the job does not run on one alone."
    todo = "Look at the partner with `sparkwright runner check`, and start the job again."


class LeaseLost(SparkwrightError):
    reference = "lease-lost"
    means = "The other Spark of the pair no longer answered in the middle of the job; soon it may take a job of its own."
    todo = "Look at the network between the two and at the partner, and start the job again. Both are cleaned."


class InstallerUnfit(SparkwrightError):
    reference = "installer-unfit"
    means = "An image installs a release with that release's own sparkwright, and this one brings none, or one from before it could serve."
    todo = "Publish the wheels of the next build with this version; a release that is published is never changed."


class RegistryUnreachable(SparkwrightError):
    reference = "registry-unreachable"
    means = "The container engine does not reach the registry: a wrong name, no network, or a registry without TLS that it does not trust."
    todo = "Try `docker push` yourself; for a registry without TLS see `insecure-registries` in the engine's configuration."


class RegistryRefused(SparkwrightError):
    reference = "registry-refused"
    means = "The registry does not take the image from this user: no or other credentials, no right to write there, or no room."
    todo = "Log in with `docker login` as somebody who may push there; sparkwright keeps no credentials of its own."


class ImageTagTaken(SparkwrightError):
    reference = "image-tag-taken"
    means = "The repository has another image under the tag of this release, perhaps on another base; nothing is overwritten."
    todo = "Push to another repository, or remove the tag there if nobody uses it."


class ImageDigestDiffers(SparkwrightError):
    reference = "image-digest-differs"
    means = "The registry names another image than was pushed: somebody pushed at the same time, or something between changed it."
    todo = "Do not use that tag; find out who writes to the repository, and push again."


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

"""How a tree becomes a wheel: tools, arch rules, plan, compiling, wheels."""

from collections.abc import Mapping
from typing import ClassVar

from sparkwright.core.errors import Advice, SparkwrightError


class BuildError(SparkwrightError):
    """A build failed, or its inputs or its result break a rule of the stack."""

    references: ClassVar[Mapping[str, Advice]] = {
        "arch-mismatch": Advice(
            "CMake folded or dropped the requested architecture for these units; the wheel would "
            "not hold machine code for it.",
            "Apply the rule named beside each unit, or list the unit under `kept` with a reason. "
            "Correct entries that are not true; list a unit that a rule removes under `dropped`.",
        ),
        "audit-failed": Advice(
            "The machine code inside the wheel is not what the policy in ci/audit.yaml asks for.",
            "Do not publish the wheel. Compare the findings with the plan of the same build.",
        ),
        "base-mismatch": Advice(
            "The official wheel was not built from the locked source, so a graft onto it would "
            "mix two releases.",
            "Check that stack.yaml names the same version for the source and for the base wheel, "
            "then run `sparkwright lock`.",
        ),
        "build-downloads": Advice(
            "A build program tried to download a source that the lock does not name; the same "
            "address may serve another file tomorrow.",
            "Lock that source (`sparkwright lock`), or switch off the part of the build that "
            "downloads it.",
        ),
        "build-failed": Advice(
            "Upstream's build backend ended with an error.",
            "Read its last lines above; the full log is named there.",
        ),
        "compile-failed": Advice(
            "The compiler refused a unit, or crashed, or another step failed. Units compiled so "
            "far are kept.",
            "Read the compiler's lines above. If they report a fault of the compiler itself, run "
            "the build again, and report the fault to its maker if it stays.",
        ),
        "configure-failed": Advice(
            "CMake could not configure the patched tree: a tool is missing or too old, or the "
            "tree needs a source that the lock does not name.",
            "Read its last lines above. For Python's headers: sudo apt-get install python3-dev. "
            "A newer compiler goes into CXX and CC.",
        ),
        "early-check-failed": Advice(
            "The build would fail later; the checks before it list all findings at once.",
            "Correct every finding above, then run again.",
        ),
        "isolation-missing": Advice(
            "The system does not let users create namespaces, as on Ubuntu 24.04 and in most "
            "containers.",
            "Allow namespaces (sudo sysctl kernel.apparmor_restrict_unprivileged_userns=0), or "
            "build as root; in a container of docker, start that with --privileged.",
        ),
        "memory-exceeded": Advice(
            "Compiling one unit alone takes more memory than there is: the system killed its "
            "compiler twice.",
            "Raise --memory, close other programs, or add memory or swap; a stack without this "
            "unit needs less. Compiled units are kept.",
        ),
        "omission-idle": Advice(
            "The official wheel does not hold what environment.yaml leaves out: another release "
            "moved it, or the name is misspelt.",
            "Compare the names above with what is left out, which `audit` lists, and correct or "
            "remove the entry under `unused` in environment.yaml.",
        ),
        "pins-disagree": Advice(
            "A release of the stack requires another release of a project than the stack names.",
            "Choose releases that fit. To accept another release for good, name it under `requires`"
            " in build/<stack>/environment.yaml. lock, plan and patch bump go on once with "
            "--force-pin.",
        ),
        "requirement-mismatch": Advice(
            "The official wheel does not require what environment.yaml would change.",
            "Read the wheel's requirements, then correct or remove the entry under `requires` in "
            "environment.yaml.",
        ),
        "rule-mismatch": Advice(
            "Upstream moved or reworded the text that the rule was written for.",
            "Read the file at the lines listed, then give the rule a text that occurs once.",
        ),
        "target-empty": Advice(
            "Upstream's CMake compiles nothing of a target for this architecture.",
            "Leave it out of --targets, or of `targets` of the fork in stack.yaml.",
        ),
        "target-mismatch": Advice(
            "A library that was compiled here is not for the machine of the wheel, or needs more "
            "of that machine than the official library does.",
            "Do not install the wheel. Find the library or header of this machine that was used "
            "in the build for the other one.",
        ),
        "target-unknown": Advice(
            "The targets that are asked for are those of another version: upstream's CMake has "
            "no target of that name.",
            "Name targets of the list above, in the order of precedence: --targets, `targets` of "
            "the fork in stack.yaml, those of build/STACK/environment.yaml.",
        ),
    }

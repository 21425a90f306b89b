"""
A wheel by the project's own build backend (PEP 517), in the locked environment and without a
network.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from sparkwright.builder.environment.sandbox import Sandbox
from sparkwright.builder.environment.toolchain import ForkEnvironment, Toolchain
from sparkwright.builder.errors import BuildError
from sparkwright.builder.wheel import archive
from sparkwright.builder.wheel.archive import WheelName
from sparkwright.builder.wheel.sbom import Papers
from sparkwright.builder.wheel.version import labelled
from sparkwright.core.console import console
from sparkwright.forks.context import RunContext

#: Dates carry no meaning in a wheel; this is the earliest that a zip archive can state
#: (1980-01-01).
EPOCH = {"SOURCE_DATE_EPOCH": "315532800"}

#: The hook is called as PEP 517 says; its working directory is the source tree, which is first on
#: its path where it asks for that.
_HOOK = """\
import importlib, os, sys, tomllib
os.chdir(sys.argv[2])
with open("pyproject.toml", "rb") as stream:
    system = tomllib.load(stream)["build-system"]
for entry in reversed(system.get("backend-path", [])):
    sys.path.insert(0, os.path.join(os.getcwd(), entry))
module, _, attribute = system.get("build-backend", "setuptools.build_meta:__legacy__").partition(":")
backend = importlib.import_module(module)
for part in filter(None, attribute.split(".")):
    backend = getattr(backend, part)
print("wheel:", backend.build_wheel(sys.argv[1]))
"""


def build(
    session: RunContext,
    tools: Toolchain,
    settings: ForkEnvironment,
    fork: str,
    tree: str,
    label: str,
    papers: Papers,
    folder: Path,
) -> Path:
    """
    Build the wheel of *tree* into *folder*, its version with the local *label*, and put its
    *papers* into it.

    Raises:
        build-failed: The backend failed, or made no wheel.
        build-downloads: It tried to download something, whether or not it minded that it could not.
    """
    work = session.store.folder("work", session.project.stack, fork)
    with (
        session.store.building(work / "tree") as source,
        session.store.building(work / "wheel") as made,
    ):
        session.objects.archive(tree, source)
        sandbox = Sandbox.create(
            {source: f"{fork}/src", made: f"{fork}/wheel", tools.root: "tools"}
        )
        variables = tools.environment(PIP_NO_INDEX="1", **EPOCH, **settings.variables)
        env = {name: sandbox.translate(value) for name, value in variables.items()}
        log = session.store.folder("logs") / f"{session.project.stack}-{fork}-build.log"
        with console.step(f"build {fork} with its own backend"):
            path = run(sandbox, tools, source, made, env, log=log, what=fork)
        version = labelled(WheelName.of(path.name).version, label)
        sbom = papers.sbom(WheelName.of(path.name, version))
        return archive.remake(
            path,
            folder,
            version=version,
            version_files=settings.version_files,
            build_record=papers.record,
            sbom=sbom,
        )


def run(
    sandbox: Sandbox,
    tools: Toolchain,
    source: Path,
    made: Path,
    env: Mapping[str, str],
    *,
    log: Path,
    what: str,
    **options: Any,
) -> Path:
    """
    Let the backend of the project in *source* write its wheel to the empty folder *made*, and
    return the wheel.

    Args:
        what: The fork, for the error.
        options: As for `process.run`.

    Raises:
        build-failed, build-downloads: See `build`.
    """
    inside = sandbox.sandbox_path
    command: list[str | Path] = [
        inside(tools.python),
        "-c",
        _HOOK,
        str(inside(made)),
        str(inside(source)),
    ]
    sandbox.run(
        command,
        cwd=source,
        env=env,
        log=log,
        failure=partial(BuildError, "build-failed"),
        what=f"{what}'s build backend failed.",
        **options,
    )
    wheels = list(made.glob("*.whl"))
    if len(wheels) != 1:
        raise BuildError(
            "build-failed",
            f"{what}'s build backend made {len(wheels)} wheels instead of one.",
            details=[f"full log: {log}"],
        )
    return wheels[0]

"""A wheel by the project's own build backend (PEP 517), in the locked environment and without a network of its own."""

from __future__ import annotations

from pathlib import Path

from sparkwright import process
from sparkwright.build import wheelfile
from sparkwright.build.toolchain import ForkEnvironment, Toolchain
from sparkwright.build.version import labelled
from sparkwright.build.wheelfile import WheelName
from sparkwright.console import console
from sparkwright.errors import BuildFailed
from sparkwright.forks.session import Session

#: The hook is called as PEP 517 says; its working directory is the source tree, which is first on its path where it asks for that.
_HOOK = """\
import importlib, os, sys, tomllib
with open("pyproject.toml", "rb") as stream:
    system = tomllib.load(stream)["build-system"]
for entry in reversed(system.get("backend-path", [])):
    sys.path.insert(0, os.path.join(os.getcwd(), entry))
module, _, attribute = system["build-backend"].partition(":")
backend = importlib.import_module(module)
for part in filter(None, attribute.split(".")):
    backend = getattr(backend, part)
print("wheel:", backend.build_wheel(sys.argv[1]))
"""


def build(session: Session, tools: Toolchain, settings: ForkEnvironment, fork: str, tree: str, folder: Path) -> Path:
    """
    Build the wheel of *tree* into *folder*, with our version label.

    Raises:
        BuildFailed: The backend failed, or made no wheel.
    """
    work = session.store.folder("work", session.project.stack, fork)
    with session.store.building(work / "tree") as source, session.store.building(work / "wheel") as made:
        session.objects.archive(tree, source)
        log = session.store.folder("logs") / f"{session.project.stack}-{fork}-build.log"
        # Whatever the backend would fetch is not in the lock; a proxy that does not exist makes it fail instead.
        nowhere = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "ALL_PROXY"), "http://127.0.0.1:9")
        env = tools.environment(PIP_NO_INDEX="1", SOURCE_DATE_EPOCH="315532800", **nowhere, **settings.variables)
        with console.step(f"build {fork} with its own backend"):
            process.run(
                [tools.python, "-c", _HOOK, str(made)],
                cwd=source,
                env=env,
                log=log,
                failure=BuildFailed,
                what=f"{fork}'s build backend failed.",
            )
        wheels = list(made.glob("*.whl"))
        if len(wheels) != 1:
            raise BuildFailed(f"{fork}'s build backend made {len(wheels)} wheels instead of one.", details=[f"full log: {log}"])
        version = labelled(WheelName.of(wheels[0].name).version, session.project.spec.label)
        return wheelfile.remake(wheels[0], folder, version=version, version_files=settings.version_files)

"""The Python environment that vLLM is served from, examined without importing anything of it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from sparkwright.client.environment import Marker, Prefix, installed_at
from sparkwright.core import process
from sparkwright.core.errors import CommandError, PythonError

_ASK = """\
import importlib.metadata as metadata, importlib.util as util, json, sys
def version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
spec = util.find_spec("vllm")
folders = list(spec.submodule_search_locations or []) if spec else []
print(json.dumps({"prefix": sys.prefix, "vllm": version("vllm"), "ray": version("ray"),
                  "package": "".join(folders[:1])}))
"""


class _Answer(msgspec.Struct):
    prefix: str
    vllm: str
    ray: str
    package: str


class ServingEnvironment(msgspec.Struct, frozen=True):
    """
    An environment with vLLM.

    Attributes:
        python: Its interpreter. *folder*: the environment.
        vllm, ray: The versions of the distributions; *ray* is empty if it is missing.
        package: The folder ``vllm``.
        marker: What `sparkwright install` installed in it; None for another environment.
    """

    python: Path
    folder: Path
    vllm: str
    ray: str
    package: Path
    marker: Marker | None = None

    @property
    def release(self) -> str:
        """The name of the release; empty if `sparkwright install` did not make the environment."""
        return self.marker.name if self.marker else ""

    @property
    def wheel(self) -> str:
        """The sha256 of the wheel of vLLM; empty if it is not known."""
        return self.marker.wheels.get("vllm", "") if self.marker else ""


def examine(python: Path) -> ServingEnvironment:
    """
    Return what the environment of *python* holds.

    Raises:
        environment-unusable: It is no Python, or it has no vLLM.
    """
    python = python.absolute()
    try:
        # .pth files may print something before our line.
        lines = process.output([python, "-I", "-c", _ASK], timeout=60).splitlines()
        answer = msgspec.json.decode(lines[-1], type=_Answer)
    except (CommandError, OSError, IndexError, msgspec.DecodeError) as error:
        details = error.details if isinstance(error, CommandError) else [str(error)]
        what = f"{python} does not answer as a Python does."
        raise PythonError("environment-unusable", what, details=details) from error
    if not answer.vllm or not answer.package:
        raise PythonError(
            "environment-unusable",
            f"There is no vLLM in the environment of {python}.",
            details=[answer.prefix],
            todo="Install a release with `sparkwright install`, or name another Python with"
            " --python.",
        )
    folder = Path(answer.prefix)
    installed = installed_at(folder)
    return ServingEnvironment(
        python,
        folder,
        answer.vllm,
        answer.ray,
        Path(answer.package),
        installed[1] if installed else None,
    )


def changes(environment: ServingEnvironment) -> list[str]:
    """Return what differs from the installation, by sizes and times; nothing if unknown."""
    from sparkwright.client.install import find_changes

    if environment.marker is None:
        return []
    prefix = Prefix(environment.folder.resolve().parent.parent)
    return find_changes(prefix, environment.marker.name)

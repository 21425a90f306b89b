"""
The Python environment that vLLM is served from, and the flags that its vLLM reads.

Nothing of vLLM is imported: it ends over an unknown flag only after half a minute of imports.
"""

import ast
import difflib
import re
from collections.abc import Collection, Iterator, Sequence
from importlib import metadata
from pathlib import Path

import msgspec

from sparkwright.bench.server import flags, wheel_identity
from sparkwright.bench.server.flags import FlagError
from sparkwright.client.environment import Marker, installed_at
from sparkwright.core.errors import FileError, PythonError
from sparkwright.core.files import read_bytes

#: Bytes of a source file of vLLM that is read; arg_utils.py of 0.33.0 has 120,000.
LARGEST = 4 << 20

#: Flag that `serve` sets, or that would hide the server from it → the option to use instead.
RESERVED = {
    "--model": "use --model",
    "--host": "use --host",
    "--port": "use --port",
    "--served-model-name": "use --name",
    "--revision": "use --revision",
    "--api-key": "set the variable VLLM_API_KEY, which process lists do not show",
    "--hf-token": "set the variable HF_TOKEN, which process lists do not show",
    "--config": "use --flag, or a recipe",
    "--num-gpu-blocks-override": "use --kv-cache-memory-bytes, which is counted",
    "--uds": "use --host and --port",
    "--fd": "use --host and --port",
    "--headless": "use --join",
    "--ssl-keyfile": "use a proxy in front of the server",
    "--ssl-certfile": "use a proxy in front of the server",
    "--grpc": "not supported",
}
_FLAG = re.compile(r"--?[a-z][a-z0-9-]*", re.IGNORECASE)


class ServingEnvironment(msgspec.Struct, frozen=True):
    """
    An environment with vLLM.

    Attributes:
        prefix: Its folder.
        vllm: The version of vLLM.
        package: The folder ``vllm``.
        python: Its interpreter.
        marker: What `sparkwright install` installed in it; None for another environment.
    """

    prefix: Path
    vllm: str
    package: Path
    python: Path = Path()
    marker: Marker | None = None

    @property
    def wheel(self) -> str:
        """The sha256 of the wheel of vLLM; empty if it is not known."""
        return self.marker.wheels.get("vllm", "") if self.marker else ""

    def flags(self) -> frozenset[str]:
        """
        Return the flags of ``vllm serve``; empty if its sources are not as expected.

        Flags are string constants in ``engine/arg_utils.py`` and ``cli_args.py``, or fields of a
        class ``…FrontendArgs`` there.
        """
        # The folder was openai/ up to 0.31, launchers/ in 0.32, and is common/ in 0.33.
        interfaces = self.package.glob("entrypoints/*/cli_args.py")
        paths = (self.package / "engine" / "arg_utils.py", *interfaces)
        names = frozenset[str]()
        try:
            for path in paths:
                names |= set(_flags(ast.parse(read_bytes(path, limit=LARGEST))))
        except (FileError, SyntaxError, ValueError, RecursionError):
            return frozenset()
        return names if {"--max-model-len", "--host"} <= names else frozenset()

    def check(self, words: Sequence[str], options: Collection[str] = ()) -> None:
        """
        Check the arguments *words* of vLLM.

        Args:
            options: Those of `serve`, of which an unknown flag may be a misspelling.

        Raises:
            flag-unknown: vLLM does not know a flag, or `serve` sets it itself.
        """
        names, wrong = self.flags(), list[str]()
        for argument in flags.parse(words):
            flag = argument.words[0].partition("=")[0]
            if reason := RESERVED.get(argument.name):
                wrong.append(f"{flag}: {reason}")
            elif names and argument.name not in names:
                similar = difflib.get_close_matches(argument.name, [*names, *options], 1, 0.7)
                wrong.append("; perhaps ".join([f"{flag:.80}: unknown", *similar]))
        if wrong:
            raise FlagError(
                "flag-unknown",
                f"vLLM {self.vllm} does not take {len(wrong)} of these arguments.",
                details=wrong,
            )


def _flags(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if _FLAG.fullmatch(node.value):
                yield node.value
        elif isinstance(node, ast.ClassDef) and node.name.endswith("FrontendArgs"):
            for field in node.body:
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    yield "--" + field.target.id.replace("_", "-")


def examine(python: Path) -> ServingEnvironment:
    """
    Return what the environment of *python* holds.

    Raises:
        environment-unusable: It is no Python, or it has no vLLM.
    """
    python = python.absolute()
    site, prefix = wheel_identity.site_packages(python), python.parent.parent
    for distribution in metadata.distributions(name="vllm", path=[str(site)]):
        version, marker = distribution.version, installed_at(prefix)
        return ServingEnvironment(prefix, version, site / "vllm", python, marker)
    raise PythonError(
        "environment-unusable",
        f"There is no vLLM in the environment of {python}.",
        details=[str(site)],
        todo="Install a release with `sparkwright install`, or name another Python with --python.",
    )

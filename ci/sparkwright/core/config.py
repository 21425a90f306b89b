"""
The user's configuration, and the folder of the reviewed data: a checkout, or, for machines that
only serve, the installed program.

The configuration is ``config.yaml`` in the platform's folder, or the file that
``SPARKWRIGHT_CONFIG`` names. The wheel of the program carries what serving needs below
``sparkwright/data`` (pyproject.toml), laid out as in a checkout, so that whoever reads it need not
know which of the two it reads.
"""

import os
import sys
from pathlib import Path

import msgspec
import platformdirs

from sparkwright.core import strict_yaml
from sparkwright.core.errors import UsageError

PACKAGE = Path(__file__).parents[1]
#: The folder of the data files of an installed program.
DATA = PACKAGE / "data"


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    The user's configuration.

    Attributes:
        mirrors: Beginning of an address → its replacement.
    """

    mirrors: dict[str, str] = {}


def config() -> Config:
    """
    Return the user's configuration; the defaults where there is no file.

    Raises:
        file-invalid: The file is damaged, or ``SPARKWRIGHT_CONFIG`` names one that does not exist.
    """
    named = os.environ.get("SPARKWRIGHT_CONFIG")
    own = platformdirs.user_config_path("sparkwright", appauthor=False) / "config.yaml"
    return strict_yaml.load(Path(named or own), Config) if named or own.is_file() else Config()


def mirror_map(options: list[str]) -> dict[str, str]:
    """
    Return the mirrors of the ``--mirror URL=REPLACEMENT`` *options*, and those of the user's
    configuration whose addresses no option covers.

    Raises:
        usage: An option has no ``=`` or an empty side.
        file-invalid: As `config`.
    """
    by_option = dict[str, str]()
    for option in options:
        url, _, replacement = option.partition("=")
        if not url or not replacement:
            raise UsageError("usage", f"--mirror {option!r} is not of the form URL=REPLACEMENT.")
        by_option[url] = replacement
    covered = tuple(map(comparable, by_option))
    own = config().mirrors.items()
    return {url: other for url, other in own if not comparable(url).startswith(covered)} | by_option


def comparable(address: str) -> str:
    """Return *address* in the form in which it is compared: GitHub does not regard case."""
    return address.lower() if address.lower().startswith("https://github.com/") else address


def checkout() -> Path | None:
    """
    Return the checkout to work on: the nearest folder upwards that holds stacks, else the one this
    program lies in, if it does.
    """
    folders = (Path.cwd(), *Path.cwd().parents, PACKAGE.parents[1])
    return next((folder for folder in folders if any(folder.glob("forks/*/stack.yaml"))), None)


def root(named: Path | None = None) -> Path:
    """
    Return the folder below which ``ci/recipes`` and ``ci/gates`` lie: *named*, else a checkout's,
    else the program's own.
    """
    return named or checkout() or DATA


def install_full() -> str:
    """
    Return the command that installs the program with the part `full`, from a checkout: no package
    index has it, so its bare name would be anybody's.
    """
    own = PACKAGE.parents[1]
    folder = own if (own / "pyproject.toml").exists() else "CHECKOUT"
    return f"{sys.executable} -m pip install --editable '{folder}[full]'"

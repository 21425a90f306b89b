"""Words of command lines: which are flags, and what of them is never shown."""

import re
import shlex
from collections.abc import Sequence

from sparkwright.core.console import pieces
from sparkwright.core.http import redact_credentials

_NUMBER = re.compile(r"-[0-9.]+(e-?[0-9]+)?")
#: Names of flags, variables and settings that hold a secret. Not meant: tokens of a text and their
#: ids (max_tokens, token_ids), heads of keys (num_key_value_heads), and the list of headers that a
#: browser may send (allowed_headers).
SECRET = re.compile(
    r"token(?!s|iz|[-_]i[dn])|keys?(?![\w-])|secret|passw|passphrase|credential|authorization"
    r"|(?<![a-z])auth(?![a-z])|(?<!allowed[-_])headers",
    re.IGNORECASE,
)
#: Such a name, also within JSON, and all that follows: its value may hold any character.
_ASSIGNED = re.compile(
    rf"""((?:{SECRET.pattern})[\w.-]*[\\"']*\s*[=:]\s*).+""", re.IGNORECASE | re.DOTALL
)


def is_flag(word: str) -> bool:
    """Return whether *word* is a flag, and no value of one."""
    return word.startswith("-") and word != "-" and not _NUMBER.fullmatch(word)


def redact(words: Sequence[str]) -> list[str]:
    """Return the *words* of a command line without the values of secrets."""
    shown, secret = list[str](), False
    for word in words:
        value = word.removeprefix("--flag=")
        hidden = secret and not is_flag(value)
        shown.append("***" if hidden else _ASSIGNED.sub(r"\1***", redact_credentials(word)))
        if is_flag(value) and value != "--flag":
            secret = "=" not in value and bool(SECRET.search(value))
    return shown


def shell_lines(words: Sequence[str]) -> str:
    """
    Return *words* as a shell reads them, in lines of 80 columns; flags with their values. A longer
    word goes on at the beginning of the next line.
    """
    lines = list[str]()
    for word in words:
        text = "\\\n".join(map(shlex.quote, pieces(word, 74) or [""]))
        if lines and is_flag(lines[-1]) and not is_flag(word) and len(lines[-1] + text) < 74:
            text = f"{lines.pop()} {text}"
        lines.append(text)
    return " \\\n  ".join(lines)

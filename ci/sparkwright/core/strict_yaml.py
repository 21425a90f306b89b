"""
Reviewed YAML files, read strictly.

PyYAML's safe loader accepts what breaks a lock in silence: duplicate keys (the last one wins) and
aliases that expand without bound. Both are refused here, and msgspec refuses every value of a wrong
type or field of an unknown name.
"""

import re
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import yaml

from sparkwright.core.errors import FileError
from sparkwright.core.files import read_text

T = TypeVar("T")

#: Text that a person wrote, not blank.
Prose = Annotated[str, msgspec.Meta(pattern=r"\S")]

#: Bytes of the largest reviewed file.
LARGEST = 4 << 20


class _StrictLoader(yaml.SafeLoader):
    """The safe loader, without duplicate keys, aliases and merge keys."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()  # type: ignore[no-untyped-call]
            raise yaml.constructor.ConstructorError(
                None, None, f"alias *{event.anchor} is not allowed", event.start_mark
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        names: set[str] = set()
        for name, _ in node.value:
            problem = (
                "merge keys are not allowed"
                if name.tag == "tag:yaml.org,2002:merge"
                else "a key must be a plain value"
                if not isinstance(name, yaml.ScalarNode)
                else f"key {name.value!r} appears twice"
                if name.value in names
                else ""
            )
            if problem:
                raise yaml.constructor.ConstructorError(None, None, problem, name.start_mark)
            names.add(name.value)
        return super().construct_mapping(node, deep=deep)


def parse(text: str, kind: type[T], origin: str) -> T:
    """
    Return *text* as a record of type *kind*.

    Raises:
        file-invalid: The text is not YAML, repeats a key, or does not fit the record; the details
            say where.
    """
    try:
        data = yaml.load(text, Loader=_StrictLoader)  # noqa: S506  a safe loader
    # PyYAML lets errors of Python through for a 13th month, a number of 5,000 digits, and the like.
    except (yaml.YAMLError, RecursionError, ValueError, LookupError, AttributeError) as error:
        raise FileError(
            "file-invalid", f"{origin} is not readable as YAML.", details=str(error).splitlines()
        ) from error
    return convert(data, kind, origin)


def convert(data: Any, kind: type[T], origin: str) -> T:
    """Return *data* as a record of type *kind*; raises `file-invalid` as `parse`."""
    try:
        return msgspec.convert(data, kind, strict=True)
    except msgspec.ValidationError as error:
        raise FileError(
            "file-invalid", f"{origin} does not have the expected fields.", details=[str(error)]
        ) from error


def load(path: Path, kind: type[T]) -> T:
    """
    Return the file at *path* as a record of type *kind*; raises `file-invalid` as `parse` and
    `files.read_text`.
    """
    return parse(read_text(path, limit=LARGEST), kind, str(path))


def compile_patterns(*patterns: str) -> None:
    """Raise ValueError unless all *patterns* are regular expressions."""
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{pattern!r} is not a regular expression: {error}") from None


def dump(record: Any) -> str:
    """
    Return *record* as YAML in the order of its fields, with quotes where YAML would read another
    type.
    """
    return yaml.safe_dump(
        msgspec.to_builtins(record), sort_keys=False, allow_unicode=True, width=120
    )

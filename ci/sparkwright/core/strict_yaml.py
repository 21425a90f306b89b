"""
Reviewed YAML files, read strictly.

PyYAML's safe loader still accepts what breaks a lock in silence: duplicate keys (the last one wins), unquoted digits (a
commit becomes a number), aliases that expand without bound. Duplicates and aliases are refused here, and msgspec refuses
every value of a wrong type or of an unknown name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml

from sparkwright.core.errors import FileError

T = TypeVar("T")

#: A reviewed file is small; a larger one is not one of ours.
LARGEST = 4 * 1024 * 1024

_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


# The composer comes first, since the C loader has one of its own that nothing can override and that deep nesting crashes.
class _StrictLoader(yaml.composer.Composer, _Base):  # type: ignore[misc]  # chosen at run time: C where PyYAML was built with it
    """The safe loader, without duplicate keys, aliases and merge keys."""

    def __init__(self, stream: str) -> None:
        yaml.composer.Composer.__init__(self)
        _Base.__init__(self, stream)

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            raise yaml.constructor.ConstructorError(None, None, f"alias *{event.anchor} is not allowed", event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for name, _ in node.value:
            if name.tag == "tag:yaml.org,2002:merge":
                raise yaml.constructor.ConstructorError(None, None, "merge keys are not allowed", name.start_mark)
            if not isinstance(name, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key must be a plain value", name.start_mark)
            if name.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {name.value!r} appears twice", name.start_mark)
            seen.add(name.value)
        return super().construct_mapping(node, deep=deep)  # type: ignore[no-any-return]  # the base is chosen at run time

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep=deep)
        except (ValueError, LookupError, AttributeError) as error:
            # PyYAML lets these through for a 13th month, a number of 5000 digits, and the like.
            raise yaml.constructor.ConstructorError(None, None, f"{node.value!r:.80} cannot be read", node.start_mark) from error


def parse(text: str, kind: type[T], origin: str) -> T:
    """
    Return *text* as a record of type *kind*.

    Raises:
        file-invalid: The text is not YAML, repeats a key, or does not fit the record; the message names the place.
    """
    try:
        data = yaml.load(text, Loader=_StrictLoader)  # noqa: S506  a subclass of the safe loader
    except (yaml.YAMLError, RecursionError) as error:
        raise FileError("file-invalid", f"{origin} is not readable as YAML.", details=str(error).splitlines()) from error
    try:
        return msgspec.convert(data, kind, strict=True)
    except msgspec.ValidationError as error:
        raise FileError("file-invalid", f"{origin} does not have the expected fields.", details=[str(error)]) from error


def load(path: Path, kind: type[T]) -> T:
    """
    Return the file at *path* as a record of type *kind*.

    Raises:
        file-invalid: As `parse`; also when the file is missing, is not UTF-8 or is larger than `LARGEST`.
    """
    try:
        if path.stat().st_size > LARGEST:
            raise FileError("file-invalid", f"{path} is larger than {LARGEST} bytes.")
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FileError("file-invalid", f"{path} cannot be read.", details=[str(error)]) from error
    return parse(text, kind, str(path))


class _Dumper(yaml.SafeDumper):
    """The safe dumper, which writes the line ends of other alphabets as they are and reads them as blanks."""


def _text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    style = '"' if {"\x85", "\u2028", "\u2029"} & set(text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style)


_Dumper.add_representer(str, _text)


def dump(record: Any) -> str:
    """Return *record* as YAML in the order of its fields, every string quoted where YAML would read it as something else."""
    return yaml.dump(msgspec.to_builtins(record), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)

"""Arch rules: exactly the places they were written for, or an error that says where upstream went."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from tests.refusals import refusal

from sparkwright.builder.arch import rules as archs
from sparkwright.builder.arch.rules import ArchRule, ArchRules, Site
from sparkwright.core import strict_yaml

REVIEWED = Path(__file__).parents[2] / "build"

TEXT = """\
if(TOOLKIT VERSION_GREATER_EQUAL 13.4)
  set(SUPPORTED "7.5;10.7;12.0")
elseif(TOOLKIT VERSION_GREATER_EQUAL 13.0)
  set(SUPPORTED "7.5;12.0")
else()
  set(SUPPORTED "7.5;12.0;12.1")
endif()
pick(REPACK_ARCHS "8.0+PTX" "${ARCHS}")
"""

RULE = ArchRule(
    name="supported", fork="mini", file="CMakeLists.txt", command="set", where=("SUPPORTED",), argument=1,
    expect="7.5;12.0", append=("12.1",),
    under=("TOOLKIT VERSION_GREATER_EQUAL 13.0",), reason="folds", drop_when="listed",
)  # fmt: skip


def rewrite(text: str, *rules: ArchRule) -> tuple[dict[str, bytes], tuple[Site, ...]]:
    return archs.rewrite({"CMakeLists.txt": text.encode()}.get, rules)


def change(**fields: object) -> ArchRule:
    return msgspec.structs.replace(RULE, **fields)


def test_one_branch_is_changed_and_no_other_byte() -> None:
    files, sites = rewrite(TEXT, RULE)
    assert files["CMakeLists.txt"].decode() == TEXT.replace('"7.5;12.0")\nelse()', '"7.5;12.0;12.1")\nelse()')
    assert sites == (Site("supported", "CMakeLists.txt", 4, "7.5;12.0", "7.5;12.0;12.1"),)


def test_two_rules_in_one_file_do_not_depend_on_their_order() -> None:
    other = change(name="repack", command="PICK", where=("REPACK_ARCHS",), under=(), expect="8.0+PTX", append=("12.0f", "12.1f"))
    (one, _), (two, sites) = rewrite(TEXT, RULE, other), rewrite(TEXT, other, RULE)
    assert one == two
    assert b'pick(REPACK_ARCHS "8.0+PTX;12.0f;12.1f" "${ARCHS}")' in one["CMakeLists.txt"]
    assert [site.rule for site in sites] == ["repack", "supported"]


UNEXPECTED = TEXT.replace('"7.5;12.0")\nelse', '"7.5;9.0;12.0")\nelse')
EXTENDED = TEXT.replace('"7.5;12.0")\nelse', '"7.5;12.0;12.1")\nelse')
TWICE = TEXT.replace('  set(SUPPORTED "7.5;12.0")\n', '  set(SUPPORTED "7.5;12.0")\n' * 2)


@pytest.mark.parametrize(
    ("text", "fields", "lines"),
    [
        (UNEXPECTED, {}, ["CMakeLists.txt:4: holds '7.5;9.0;12.0', the rule expects '7.5;12.0'"]),
        (UNEXPECTED, {}, ["CMakeLists.txt:2: lies in if(TOOLKIT VERSION_GREATER_EQUAL 13.4)"]),
        (EXTENDED, {}, ["CMakeLists.txt:4: holds 12.1 already"]),
        (EXTENDED, {"expect": "7.5;12.0;12.1"}, ["CMakeLists.txt:4: holds 12.1 already"]),
        (TWICE, {}, ["CMakeLists.txt:4: matches", "CMakeLists.txt:5: matches"]),
        ("project(x)\n", {}, ["no set(SUPPORTED …) in CMakeLists.txt"]),
        (TEXT, {"file": "cmake/gone.cmake"}, ["cmake/gone.cmake"]),
    ],
)
def test_a_rule_that_does_not_match_one_place_lists_the_near_misses(text: str, fields: dict[str, object], lines: list[str]) -> None:
    with refusal("rule-mismatch") as caught:
        rewrite(text, change(**fields))
    assert set(lines) <= set(caught.value.details)


def test_two_rules_must_not_change_one_list() -> None:
    with refusal("rule-mismatch", match="another rule changes"):
        rewrite(TEXT, RULE, change(name="again", append=("12.2",)))


@pytest.mark.parametrize("missing", ["reason", "drop_when", "expect", "append", "where"])
def test_reviewed_fields_are_mandatory(missing: str) -> None:
    fields = {name: value for name, value in msgspec.to_builtins(RULE).items() if name != missing}
    with refusal("file-invalid"):
        strict_yaml.parse(strict_yaml.dump({"rules": [fields]}), ArchRules, "archs.yaml")


def test_a_kept_unit_needs_a_reason_and_rules_need_names_of_their_own(tmp_path: Path) -> None:
    with refusal("file-invalid"):
        strict_yaml.parse("kept: [{fork: mini, unit: a.cu, gencode: compute_80}]", ArchRules, "archs.yaml")
    path = tmp_path / "archs.yaml"
    path.write_text(strict_yaml.dump(ArchRules(rules=(RULE, RULE))))
    with refusal("file-invalid", match="two rules of one name"):
        archs.load(path)


@pytest.mark.parametrize("path", sorted(REVIEWED.glob("*/archs.yaml")), ids=lambda path: path.parent.name)
def test_the_reviewed_files_are_readable(path: Path) -> None:
    rules = archs.load(path)
    reasons = [rule.reason for rule in rules.rules] + [entry.reason for entry in rules.kept]
    assert all(len(reason) > 40 for reason in reasons)

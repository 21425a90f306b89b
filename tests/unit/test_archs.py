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


def test_no_site_lists_the_near_misses() -> None:
    with refusal("rule-mismatch", match=r"matches 0 places in CMakeLists\.txt instead of 1") as caught:
        rewrite(TEXT.replace('"7.5;12.0")\nelse', '"7.5;9.0;12.0")\nelse'), RULE)
    assert "CMakeLists.txt:4: holds '7.5;9.0;12.0', the rule expects '7.5;12.0'" in caught.value.details
    assert "CMakeLists.txt:2" in caught.value.details[0]
    assert "lies in if(TOOLKIT VERSION_GREATER_EQUAL 13.4)" in caught.value.details[0]


def test_two_sites_instead_of_one() -> None:
    twice = TEXT.replace('  set(SUPPORTED "7.5;12.0")\n', '  set(SUPPORTED "7.5;12.0")\n  set(SUPPORTED "7.5;12.0")\n')
    with refusal("rule-mismatch", match="matches 2 places") as caught:
        rewrite(twice, RULE)
    assert {"CMakeLists.txt:4: matches", "CMakeLists.txt:5: matches"} <= set(caught.value.details)


@pytest.mark.parametrize("expect", ["7.5;12.0", "7.5;12.0;12.1"])
def test_a_rule_without_effect_is_an_error(expect: str) -> None:
    text = TEXT.replace('"7.5;12.0")\nelse', '"7.5;12.0;12.1")\nelse')
    with refusal("rule-mismatch", match="matches 0 places") as caught:
        rewrite(text, change(expect=expect))
    assert "CMakeLists.txt:4: holds 12.1 already" in caught.value.details
    assert caught.value.todo.endswith("listed")


def test_missing_command_missing_file_and_clash() -> None:
    with refusal("rule-mismatch") as caught:
        rewrite("project(x)\n", RULE)
    assert caught.value.details == ("no set(SUPPORTED …) in CMakeLists.txt",)
    with refusal("rule-mismatch", match="which the source tree does not have"):
        rewrite(TEXT, change(file="cmake/gone.cmake"))
    with refusal("rule-mismatch", match="another rule changes"):
        rewrite(TEXT, RULE, change(name="again", append=("12.2",)))
    with refusal("rule-mismatch", match="not well-formed CMake at line 1"):
        rewrite("if(A)\n", RULE)


@pytest.mark.parametrize("missing", ["reason", "drop_when", "expect", "append", "where"])
def test_reviewed_fields_are_mandatory(missing: str) -> None:
    data = {"rules": [{name: value for name, value in msgspec.to_builtins(RULE).items() if name != missing}]}
    with refusal("file-invalid"):
        strict_yaml.parse(strict_yaml.dump(data), ArchRules, "archs.yaml")
    data["rules"][0][missing] = " " if missing != "where" else []
    if missing != "expect":
        with refusal("file-invalid"):
            strict_yaml.parse(strict_yaml.dump(data), ArchRules, "archs.yaml")


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

"""Pages of releases: what the records say, no more, and no string of a record as markup."""

import html.parser
import re
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from tests.support import tufindex

from sparkwright.client.records import (
    ForkSource,
    GateResult,
    Missing,
    Proof,
    Release,
    ReleasePatch,
    Speed,
)
from sparkwright.release import pages

BASE = "ab" * 32
FAST = Speed("1024/1024 c1", "tpot", "pass", 0.95, 0.94, 0.96)
EVEN = Speed("1024/1024 c8", "rate", "pass", 1.01, 0.98, 1.04)
NONE = Speed("1024/1024 c1", "ttft", "not-run")
PROOF = Proof(
    policy="0" * 64,
    missing=(Missing("G5", "not-run", "not-climbed", "the gate was not run"),),
    gates=(GateResult("G0", "the wheel", "pass"), GateResult("G5", "serving", "not-run", "nobody")),
    recipes=("toy-cpu",),
    speeds=(FAST, EVEN, NONE),
    baseline=f"stock vLLM 0.33.0 ({BASE[:16]})",
    margin=0.05,
    host={"gpu": "NVIDIA GB10"},
)
PATCHES = (
    ReleasePatch("a.patch", "1" * 64, "Clamp the samples", "it hangs"),
    ReleasePatch("b.patch", "2" * 64, "Convert natively", "it is slow", 35568),
)  # fmt: skip


def release(name: str = "2026.11.2", *, proof: Proof = PROOF, **changed: Any) -> Release:
    """Return a release with one wheel of vLLM."""
    plain = tufindex.release(name)[0]
    fork = ForkSource(
        name="vllm", version="0.33.0", kind="git", origin="https://a.example/vllm", pin="c" * 40, tree="d" * 40, resolved=True,
        built="graft", source_tree="e" * 40, base=BASE, patches=PATCHES, cuda="cu130", isolation="namespace",
    )  # fmt: skip
    wheels = tuple(replace(wheel, proof=proof) for wheel in plain.wheels)
    return replace(plain, **{"wheels": wheels, "forks": (fork,), "before": "2026.11.1", **changed})


class Elements(html.parser.HTMLParser):
    """The elements of a page, by name, with their attributes, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.attributes: dict[str, set[str]] = {}
        self.links: list[str] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes.setdefault(tag, set()).update(name for name, _ in attrs)
        self.links += [value or "" for name, value in attrs if name in ("href", "src")]

    def handle_data(self, data: str) -> None:
        self.text += data


def page(record: Release, before: Release | None = None, yanked: str = "") -> tuple[str, Elements]:
    """Return the page of a release, and its elements."""
    state, view = replace(tufindex.state(record), yanked=yanked), pages.view(record, before)
    text = pages.template("release.html").render(
        title=record.name,
        state=state,
        url="https://a.example/",
        link=lambda file, _: file.path,
        **view,
    )
    return text, Elements(text)


def test_release_before_decides_what_is_a_change() -> None:
    old = release(
        "2026.11.1",
        forks=(replace(release().forks[0], patches=(replace(PATCHES[0], sha256="9" * 64), replace(PATCHES[1], name="c.patch"))),),
    )  # fmt: skip
    shown = page(release(), old)[1].text
    changes = re.findall(r"^vllm(\S+\.patch|#35568)(?:Clamp|Convert) [a-z ]+?(added|changed|dropped|unchanged)it", shown, flags=re.M)
    assert changes == [("a.patch", "changed"), ("#35568", "added"), ("#35568", "dropped")]
    assert "The record of 2026.11.1 is no longer in the index." in page(release())[1].text
    assert "first release of the stack" in page(release(before=""))[1].text


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({}, "vllm against the stock wheel: faster in 1, slower in 0 of 2 measured figures."),
        ({"baseline": "vllm 0.33.0"}, "It was not shown that this release is faster"),
        ({"speeds": (EVEN, NONE)}, "faster in 0, slower in 0 of 1 measured figures."),
        ({"speeds": ()}, "It was not shown that this release is faster"),
    ],
)
def test_page_claims_no_speed_that_was_not_measured(change: dict[str, Any], says: str) -> None:
    wheel = replace(release().wheels[0], project="vllm", proof=replace(PROOF, **change))
    text = page(release(wheels=(wheel,)))[1].text
    assert says in text


def test_page_says_what_is_not_known() -> None:
    fork = replace(release().forks[0], resolved=False, isolation="", patches=())
    text = page(release(forks=(fork,), proof=Proof(policy="0" * 64)))[1].text
    for says in ("(not resolved)", "not recorded", "No fork carries a patch."):
        assert says in text


HOSTILE = "</td><script>alert(1)</script>|`x`[a](http://evil.example)<img src=x onerror=y>**@all** #7 &amp;\u202e"
#: Fields that are no free text.
PLAIN = {
    "name", "version", "stack", "made", "machine", "state", "sha256", "size", "url", "uploaded", "metadata", "format", "before",
    "metric", "policy", "pythons", "packages", "project", "fork", "requires_python",
}  # fmt: skip


def poisoned(value: Any) -> Any:
    """Return *value*, a record as builtin types, with the hostile text before every string that is free text."""
    if isinstance(value, dict):
        # Patches and gates are known by the fields that only they have.
        named = "subject" in value or "title" in value
        plain = PLAIN - {"name"} if named else PLAIN
        return {key: item if key in plain else poisoned(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [poisoned(item) for item in value]
    return HOSTILE + value if isinstance(value, str) else value


def test_no_string_of_a_record_becomes_markup_and_a_page_runs_nothing() -> None:
    """A page with poison in every free field has the elements of the plain one."""
    good = release()
    bad = msgspec.convert(poisoned(msgspec.to_builtins(good)), Release)
    (shown, plain), (poison, hostile) = page(good, yanked="bad"), page(bad, yanked=HOSTILE)
    assert (hostile.attributes, hostile.links) == (plain.attributes, plain.links)
    assert ("\u202e" in poison, "script" in hostile.text) == (False, True)
    # One file, whose policy forbids scripts and anything that is fetched.
    assert {"script", "img", "iframe", "form"}.isdisjoint(plain.attributes)
    assert not any("://" in link for link in plain.links)
    assert "default-src 'none'" in shown

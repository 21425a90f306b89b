"""GitHub's API, played by a real server that misbehaves on request: no reply hangs, floods, misleads, or learns the token."""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterator
from typing import Any

import pytest
from tests.refusals import refusal
from tests.support import githubapi
from tests.support.githubapi import Answer, Handler, World, reply

from sparkwright.core.errors import SparkwrightError
from sparkwright.core.github import ADDRESS, PullRequest, pull_request, repository_of

HEAD, MERGE = "0123456789" * 4, "abcdef0123" * 4
TOKEN = "github_pat_11SECRETSECRETSECRET"
PULL: dict[str, Any] = {
    "number": 7,
    "title": "Teach the kernel to count",
    "state": "open",
    "merged": False,
    "merge_commit_sha": MERGE,
    "user": {"login": "octocat", "id": 1},
    "head": {"sha": HEAD, "ref": "count", "repo": None},
    "base": {"ref": "main", "sha": MERGE},
    "body": "Field that nobody reads",
}


@pytest.fixture(name="world")
def _world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """Return a GitHub that has the pull request above; the environment has neither token nor proxy."""
    for name in ("GITHUB_TOKEN", "GH_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    with githubapi.serve() as world:
        world.answer = record()
        yield world


def record(**changes: Any) -> Answer:
    """Return an answer with the pull request above, *changes* made to it."""
    return reply(200, json.dumps({**PULL, **changes}))


def mirror_back(handler: Handler) -> None:
    """Answer with the client's own Authorization header in every place that a message might quote."""
    secret = handler.headers.get("Authorization", "")
    words = f"\x1b[1m{secret} {secret.removeprefix('Bearer ') * 40}"
    reply(int(handler.path.rpartition("/")[2]), json.dumps({"message": words, "state": words}), Retry_After=secret)(handler)


def pull(world: World, number: int = 7) -> PullRequest:
    return pull_request(f"{world.url}/", "vllm-project", "vllm", number)


def everything(error: SparkwrightError) -> str:
    """Return everything that anybody can learn from *error*, its causes among them."""
    return "\n".join([*traceback.format_exception(error), repr(error), json.dumps(error.document(), ensure_ascii=False)])


def test_pull_request_is_read(world: World) -> None:
    """GitHub's merge_commit_sha of an open pull request is a trial merge that no branch holds, and is left out."""
    assert pull(world) == PullRequest(7, "Teach the kernel to count", "octocat", "open", HEAD, "main", "")
    assert world.asked == [("GET", "/repos/vllm-project/vllm/pulls/7")]
    world.answer = record(state="closed", merged=True)
    assert (pull(world).state, pull(world).merge) == ("merged", MERGE)
    world.answer = record(state="closed", merge_commit_sha=None, user=None)
    assert (pull(world).state, pull(world).merge, pull(world).author) == ("closed", "", "ghost")


@pytest.mark.parametrize(
    ("environment", "sent"),
    [
        ({}, ""),
        ({"GITHUB_TOKEN": "first", "GH_TOKEN": "second"}, "Bearer first"),
        ({"GITHUB_TOKEN": " \n", "GH_TOKEN": f"{TOKEN}\n"}, f"Bearer {TOKEN}"),
    ],
)
def test_token_comes_from_the_environment(
    world: World, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], sent: str
) -> None:
    """GITHUB_TOKEN comes before GH_TOKEN, and an empty variable is none."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    pull(world)

    assert world.authorizations == [sent]


@pytest.mark.parametrize("token", ["two words", f"{TOKEN}\r\nX-Other: 1", "schlüssel"])
def test_token_that_cannot_be_one_is_refused_unseen(token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token that would end or break the header is refused before it is sent, and is not shown."""
    monkeypatch.setenv("GITHUB_TOKEN", token)
    with refusal("github-refused") as caught:
        pull_request(ADDRESS, "vllm-project", "vllm", 7)

    assert token not in everything(caught.value)


@pytest.mark.parametrize(
    ("status", "reference"), [(401, "github-refused"), (403, "github-refused"), (429, "github-refused"), (404, "pull-request-gone"), (301, "pull-request-gone")]
)
def test_a_refusal_tells_the_token_and_the_pull_request_apart(world: World, monkeypatch: pytest.MonkeyPatch, status: int, reference: str) -> None:
    """A limit of hours is not waited for; GitHub's own words are shown, and nothing is asked twice."""
    monkeypatch.setenv("GITHUB_TOKEN", TOKEN)
    world.answer = reply(status, '{"message": "Bad\\ncredentials"}', X_RateLimit_Reset="1794999600")
    with refusal(reference, match=f"{status} for vllm-project/vllm#7") as caught:
        pull(world)
    assert caught.value.details == ("asked with a token", 'it says: {"message": "Bad\\ncredentials"}')
    assert len(world.asked) == 1


@pytest.mark.parametrize(
    "changes",
    [
        *(b"", b"<!DOCTYPE html>\n<title>Log in</title>", b"null", b"[]", b"{}", b"\xff\xfe", b"[" * 100_000, b'{"x":' * 100_000),
        {"number": "7"},
        {"number": 8},
        {"title": None},
        {"state": "merged"},
        {"merged": 1},
        {"merged": True},
        {"state": "closed", "merged": True, "merge_commit_sha": None},
        {"merge_commit_sha": MERGE[:-1]},
        {"head": {"sha": HEAD.upper().replace("0", "G")}},
        {"head": {"sha": HEAD + "\n"}},
        {"head": {"sha": "--upload-pack=touch".ljust(40, "a")}},
        {"head": None},
        {"base": {"ref": "--output=x"}},
        {"base": {"ref": "main..x"}},
        {"base": {"ref": "main\nx"}},
        {"user": {"login": "\x1b[2J"}},
        {"user": []},
    ],
    ids=lambda changes: str(changes)[:40],
)
def test_what_is_no_such_pull_request_is_no_answer(world: World, changes: bytes | dict[str, Any]) -> None:
    """A login page, other JSON, and a field of the wrong type or that contradicts another are never guessed at."""
    world.answer = record(**changes) if isinstance(changes, dict) else reply(200, changes)

    with refusal("github-unreachable", match="is not GitHub's answer"):
        pull(world)


@pytest.mark.parametrize("number", [200, 301, 401, 404, 429, 500])
def test_server_cannot_make_messages_hold_the_token(
    world: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """A server that sends the token back, with any status, does not bring it into an error or a log."""
    world.answer = mirror_back
    monkeypatch.setenv("GITHUB_TOKEN", TOKEN)
    with pytest.raises(SparkwrightError) as caught:
        pull(world, number)

    assert set(world.authorizations) == {f"Bearer {TOKEN}"}
    assert "SECRET" not in everything(caught.value) + "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("url", "repository"),
    [
        ("https://github.com/vllm-project/vllm.git", ("vllm-project", "vllm")),
        ("https://github.com/vllm-project/vllm", ("vllm-project", "vllm")),
        ("https://GitHub.com/NVIDIA/cutlass/", ("NVIDIA", "cutlass")),
        ("https://user:word@github.com/a/b.c.git/", ("a", "b.c")),
        ("ssh://git@github.com:22/a/.github.git", ("a", ".github")),
        ("git@github.com:flashinfer-ai/flashinfer.git", ("flashinfer-ai", "flashinfer")),
        ("https://github.com/a/b/pull/7", None),
        ("https://github.com/a", None),
        ("https://github.com/a/..", None),
        ("https://github.com/a/...git", None),
        ("https://github.com/-a/b", None),
        ("https://github.com/a/b\n", None),
        ("https://github.com/a/b?x", None),
        ("https://github.com.example/a/b", None),
        ("https://github.com@example.org/a/b", None),
        ("https://example.org/github.com/a/b", None),
        ("https://notgithub.com/a/b", None),
        ("https://gitlab.com/a/b.git", None),
        ("file:///mirrors/vllm", None),
        ("https://[", None),
        ("", None),
    ],
)
def test_a_repository_is_read_from_its_url(url: str, repository: tuple[str, str] | None) -> None:
    """GitHub's repositories are known by all forms that git takes; another host, or another page, has none."""
    assert repository_of(url) == repository

"""GitHub's API, played by a real server that misbehaves on request: no reply hangs, floods, misleads, or learns the token."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.refusals import refusal

from sparkwright.core.console import console, one_line
from sparkwright.core.errors import SparkwrightError
from sparkwright.core.github import GitHub, PullRequest, repository_of

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
    "updated_at": "2026-05-06T23:59:59Z",
    "body": "Field that nobody reads",
}


class Handler(http.server.BaseHTTPRequestHandler):
    server: Api

    def log_message(self, *_: object) -> None:
        """Say nothing; the test's output is for the test."""

    def do_GET(self) -> None:
        api = self.server
        api.asked.append((self.path, {name.lower(): value for name, value in self.headers.items()}))
        answer = api.answers[min(len(api.asked), len(api.answers)) - 1]
        with contextlib.suppress(OSError):  # the client has heard enough
            answer(self)
        self.close_connection = True


Answer = Callable[[Handler], None]


class Api(http.server.ThreadingHTTPServer):
    """
    A server that gives *answers* in their order, and the last one for ever.

    Attributes:
        asked: Path and headers of each request.
        over: Set when the test ends; until then an answer may take its time.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: list[Answer] = [record()]
        self.asked: list[tuple[str, dict[str, str]]] = []
        self.over = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}"

    @property
    def tokens(self) -> set[str]:
        return {headers.get("authorization", "") for _, headers in self.asked}


def reply(status: int, body: bytes | str = b"", **headers: str) -> Answer:
    """Return an answer with *status*; underscores in the names of *headers* stand for hyphens."""
    data = body.encode() if isinstance(body, str) else body

    def answer(handler: Handler) -> None:
        handler.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(data)

    return answer


def record(**changes: Any) -> Answer:
    """Return an answer with the pull request above, *changes* made to it."""
    return reply(200, json.dumps({**PULL, **changes}))


def mirror_back(handler: Handler) -> None:
    """Answer with the client's own Authorization header in every place that a message might quote."""
    secret = handler.headers.get("Authorization", "")
    words = f"\x1b[1m{secret} {secret.removeprefix('Bearer ') * 40}"
    reply(int(handler.path.rpartition("/")[2]), json.dumps({"message": words, "state": words}), Retry_After=secret)(handler)


@pytest.fixture(name="start")
def _start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Api]]:
    """Return a function that starts a server; the environment has neither token nor proxy."""
    for name in ("GITHUB_TOKEN", "GH_TOKEN", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy", "PIP_CERT", "SSL_CERT_FILE"):
        monkeypatch.delenv(name, raising=False)
    servers: list[Api] = []

    def start() -> Api:
        servers.append(Api())
        threading.Thread(target=servers[-1].serve_forever, args=(0.02,), daemon=True).start()
        return servers[-1]

    yield start
    for server in servers:
        server.over.set()
        server.shutdown()
        server.server_close()


@pytest.fixture(name="api")
def _api(start: Callable[[], Api]) -> Api:
    return start()


def pull(api: Api, token: str = "", *, patience: float = 20, longest_wait: float = 10) -> PullRequest:
    return GitHub(api.url, token, patience=patience, longest_wait=longest_wait).pull("vllm-project", "vllm", 7)


def said(error: SparkwrightError) -> str:
    """Return everything that anybody can learn from *error*, its causes among them."""
    return "\n".join([*traceback.format_exception(error), repr(error), json.dumps(error.document(), ensure_ascii=False)])


def test_an_open_pull_request_has_no_merge_commit(api: Api) -> None:
    """GitHub's merge_commit_sha of an open pull request is a trial merge that no branch holds, and is left out."""
    assert pull(api) == PullRequest(7, "Teach the kernel to count", "octocat", "open", HEAD, "main", "", "2026-05-06")
    api.answers = [record(state="closed", merged=True)]
    assert (pull(api).state, pull(api).merge) == ("merged", MERGE)
    api.answers = [record(state="closed", merge_commit_sha=None, user=None)]
    assert (pull(api).state, pull(api).merge, pull(api).author) == ("closed", "", "ghost")


@pytest.mark.parametrize(
    ("environment", "sent"),
    [
        ({}, ""),
        ({"GITHUB_TOKEN": TOKEN}, f"Bearer {TOKEN}"),
        ({"GH_TOKEN": TOKEN}, f"Bearer {TOKEN}"),
        ({"GITHUB_TOKEN": "first", "GH_TOKEN": "second"}, "Bearer first"),
        ({"GITHUB_TOKEN": " \n", "GH_TOKEN": f"{TOKEN}\n"}, f"Bearer {TOKEN}"),
    ],
)
def test_the_token_comes_from_the_environment(
    api: Api, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], sent: str
) -> None:
    """GITHUB_TOKEN comes before GH_TOKEN, and an empty variable is none."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    GitHub.from_environment(f"{api.url}/").pull("vllm-project", "vllm", 7)

    assert api.tokens == {sent}


@pytest.mark.parametrize("token", ["two words", f"{TOKEN}\r\nX-Other: 1", "schlüssel"])
def test_a_token_that_cannot_be_one_is_refused_unseen(token: str) -> None:
    """A token that would end or break the header is refused before it is sent, and is not shown."""
    with refusal("github-refused") as caught:
        GitHub(token=token)

    assert token not in said(caught.value)


def test_the_proxy_of_the_environment_is_used(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """A site that reaches the network through a proxy reaches GitHub as well."""
    monkeypatch.setenv("http_proxy", api.url)
    monkeypatch.setenv("no_proxy", "")
    GitHub("http://api.github.example").pull("vllm-project", "vllm", 7)

    assert api.asked[0][0] == "http://api.github.example/repos/vllm-project/vllm/pulls/7"


@pytest.mark.parametrize("status", [401, 403])
def test_a_refusal_is_the_token_s(api: Api, status: int) -> None:
    """Without a word of limits, 401 and 403 mean the token; GitHub's own reason is shown."""
    api.answers = [reply(status, '{"message": "Bad\\ncredentials"}', X_RateLimit_Remaining="41")]

    with refusal("github-refused") as caught:
        pull(api, TOKEN)
    assert caught.value.details == (f"answered {status}, asked with a token", "GitHub says: Bad credentials")
    assert len(api.asked) == 1

    with refusal("github-refused") as caught:
        pull(api)
    assert caught.value.todo == "Set GITHUB_TOKEN to a token that may read the repository."


@pytest.mark.parametrize("status", [403, 429])
def test_a_used_up_limit_says_when_it_ends(api: Api, status: int) -> None:
    """The error names the time in UTC, and that a token raises the limit."""
    api.answers = [reply(status, '{"message": "API rate limit exceeded"}', X_RateLimit_Remaining="0", X_RateLimit_Reset="1794999600")]

    with refusal("github-limited") as caught:
        pull(api)
    assert caught.value.details[0] == "the limit ends: 2026-11-18 11:00:00 UTC"
    assert "asked without a token" in caught.value.details[1]
    assert "GITHUB_TOKEN" in caught.value.todo
    assert len(api.asked) == 1


@pytest.mark.parametrize("status", [403, 429])
def test_a_short_pause_is_waited_for(api: Api, capsys: pytest.CaptureFixture[str], status: int) -> None:
    """A pause of some seconds is made and announced, and then the answer counts."""
    api.answers = [reply(status, Retry_After="1"), record()]
    began = time.monotonic()

    assert pull(api).number == 7
    assert time.monotonic() - began >= 1
    assert "asks to wait 1 s" in capsys.readouterr().err


@pytest.mark.parametrize("status", [404, 410])
def test_a_pull_request_may_be_gone(api: Api, status: int) -> None:
    """What was deleted, never existed or must not be seen is gone; nothing is asked twice."""
    api.answers = [reply(status, '{"message": "Not Found"}')]

    with refusal("pull-request-gone", match="vllm-project/vllm#7") as caught:
        pull(api)
    assert caught.value.details[-1] == "GitHub says: Not Found"
    assert len(api.asked) == 1


@pytest.mark.parametrize(
    ("owner", "name", "number"), [("..", "vllm", 1), ("a", "..", 1), ("a", "b/c", 1), ("a\nb", "c", 1), ("a", "b?", 1), ("a", "b", 0)]
)
def test_what_no_repository_is_called_is_not_asked_for(api: Api, owner: str, name: str, number: int) -> None:
    """A name that would become another path of the API is gone without a question."""
    with refusal("pull-request-gone"):
        GitHub(api.url).pull(owner, name, number)

    assert not api.asked


@pytest.mark.parametrize(
    ("body", "begins"),
    [
        (b"", ""),
        (b"<!DOCTYPE html>\n<title>Log in</title>", "<!DOCTYPE html> <title>Log in</title>"),
        (b"null", "null"),
        (b"[]", "[]"),
        (b"{}", "{}"),
        (b"\xff\xfe", "\ufffd\ufffd"),
        (b"[" * 100_000, "[" * 79 + "…"),
        (b'{"x":' * 100_000, '{"x":' * 15 + '{"x"…'),
    ],
    ids=["empty", "page", "null", "list", "object", "bytes", "deep-lists", "deep-objects"],
)
def test_what_is_no_pull_request_is_shown_by_its_beginning(api: Api, body: bytes, begins: str) -> None:
    """A login page, or any other JSON, is an error that shows what came instead."""
    api.answers = [reply(200, body)]

    with refusal("github-unreachable", match="What came for vllm-project/vllm#7 is not GitHub's answer") as caught:
        pull(api)
    assert caught.value.details[1] == f"it begins: {begins}"


@pytest.mark.parametrize(
    "changes",
    [
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
        {"updated_at": "2026-05-06"},
        {"updated_at": "2026-05-06T00:00:00"},
        {"updated_at": "2026-13-06T00:00:00Z"},
    ],
    ids=str,
)
def test_a_pull_request_of_another_shape_is_no_answer(api: Api, changes: dict[str, Any]) -> None:
    """A field of the wrong type, or that contradicts another, is never guessed at."""
    api.answers = [record(**changes)]

    with refusal("github-unreachable", match="is not GitHub's answer|is about number 8"):
        pull(api)


@pytest.mark.parametrize(
    "location",
    [
        "http://127.0.0.1:{other}/x",
        "//127.0.0.1:{other}/x",
        "http://localhost:{other}/x",
        "http://localhost:{own}/x",
        "https://127.0.0.1:{own}/x",
        "http://127.0.0.1:{other}\\@127.0.0.1:{own}/x",
        "http://127.0.0.1:{own}@127.0.0.1:{other}/x",
        "http://127.0.0.1:{own}\\@127.0.0.1:{other}/x",
        " http://127.0.0.1:{other}/x",
        "file:///etc/passwd",
        "http://[",
        "http://127.0.0.1:{own}9999/",
    ],
)
def test_no_other_host_is_asked(start: Callable[[], Api], location: str) -> None:
    """A redirect to another host, port or scheme is an error, however it is written; neither token nor request goes there."""
    api, other = start(), start()
    api.answers = [reply(302, Location=location.format(own=api.server_port, other=other.server_port)), reply(404)]

    with refusal("github-unreachable", "pull-request-gone") as caught:
        pull(api, TOKEN)
    assert not other.asked
    assert TOKEN not in said(caught.value)


@pytest.mark.parametrize("number", [200, 301, 401, 403, 404, 418, 429, 500])
def test_a_server_cannot_make_messages_hold_the_token(api: Api, capsys: pytest.CaptureFixture[str], number: int) -> None:
    """A server that sends the token back, with any status, does not bring it into an error or a log."""
    api.answers = [mirror_back]
    console.verbose = True
    try:
        with pytest.raises(SparkwrightError) as caught:
            GitHub(api.url, TOKEN, patience=2).pull("vllm-project", "vllm", number)
    finally:
        console.verbose = False

    assert api.tokens == {f"Bearer {TOKEN}"}
    assert "SECRET" not in said(caught.value) + "".join(capsys.readouterr())


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*PULL, "sha", "ref", "login"]), inner, max_size=4),
    max_leaves=8,
)


@given(st.text(st.characters() | st.sampled_from("\x1b[]\x07\x9b\x9d\\m;"), max_size=60), st.integers(1, 40))
def test_one_line_is_one_line(text: str, limit: int) -> None:
    """Any text becomes one printable line within the limit, and what is one already stays as it is."""
    line = one_line(text, limit)

    assert line.isprintable()
    assert len(line) <= limit
    assert one_line(line, limit) == line


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

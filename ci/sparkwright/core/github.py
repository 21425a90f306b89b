"""
GitHub's API: pull requests as it tells them, and the questions that `release/publish` puts to it. No other module asks it.

A reply is somebody else's word: it is bounded in time and size, decoded into a record of the few fields that are used, and
its texts are cleaned before anybody reads them. The token comes from the environment, goes to the one address that was
asked for, and is in no message.
"""

from __future__ import annotations

import contextlib
import datetime
import email.utils
import os
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Annotated, Literal
from urllib.parse import urljoin, urlsplit

import msgspec

from sparkwright import __version__
from sparkwright.core.console import console
from sparkwright.core.errors import GitHubError, SparkwrightError

if TYPE_CHECKING:
    import requests

ADDRESS = "https://api.github.com"
#: A question is asked at most this often before it counts as unanswered.
ATTEMPTS = 4
#: A renamed repository is one redirect away; a chain of them is a circle.
REDIRECTS = 3
#: Bytes of the largest reply that is read; a pull request has some ten thousand.
LARGEST = 4 * 1024 * 1024

_HEADERS = {
    "User-Agent": f"sparkwright/{__version__}",
    "Accept": "application/vnd.github+json",
    "X-GitHub-Api-Version": "2022-11-28",
    # A small reply could become a huge one when it is unpacked.
    "Accept-Encoding": "identity",
}

_REPOSITORY = r"(?P<owner>[A-Za-z0-9][A-Za-z0-9-]*)/(?P<name>(?!\.{1,2}(?:\.git)?/?\Z)[A-Za-z0-9._-]+?)"
_URL = re.compile(rf"(?:(?:https?|ssh|git)://(?:[^/@]*@)?(?i:github\.com)(?::\d+)?/|[^/@:]+@(?i:github\.com):){_REPOSITORY}(?:\.git)?/?")
#: A terminal's commands (colour, title, movement), which leave rubbish when only their first character is taken out.
_TERMINAL = re.compile(r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?|(?:\x1b\]|\x9d)[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?|\x1b[ -/]*[0-~]?")


class PullRequest(msgspec.Struct, frozen=True):
    """
    A pull request as it was when GitHub was asked.

    Attributes:
        title: One printable line of at most 300 characters.
        author: The login; ``ghost`` where the account is gone, as GitHub shows it.
        head: The commit that its branch ends in.
        base_ref: The branch that it is made for.
        merge: The commit that it became on that branch; empty unless merged.
        updated: The day (UTC) of its last change of any kind.
    """

    number: int
    title: str
    author: str
    state: Literal["open", "merged", "closed"]
    head: str
    base_ref: str
    merge: str
    updated: str


_Commit = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{40}\Z")]
# A name that git would take for an option or a range is not passed on.
_Branch = Annotated[str, msgspec.Meta(pattern=r"^(?![-/.])(?!.*\.\.)[\w./+@#=-]{1,250}\Z")]


class _Account(msgspec.Struct, frozen=True):
    login: Annotated[str, msgspec.Meta(pattern=r"^[\w.-]{1,100}(?:\[bot\])?\Z")]


class _Head(msgspec.Struct, frozen=True):
    sha: _Commit


class _Base(msgspec.Struct, frozen=True):
    ref: _Branch


class _Pull(msgspec.Struct, frozen=True):
    """The fields of GitHub's answer that are used; it has some hundred."""

    number: int
    title: str
    state: Literal["open", "closed"]
    merged: bool
    merge_commit_sha: _Commit | None
    head: _Head
    base: _Base
    user: _Account | None
    updated_at: Annotated[datetime.datetime, msgspec.Meta(tz=True)]


class _Message(msgspec.Struct, frozen=True):
    message: str


class Reply(msgspec.Struct, frozen=True):
    """A reply, its body read up to one byte more than `LARGEST`; the names of its headers are in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def limited(self) -> bool:
        """Whether it says that too much was asked; GitHub has four ways to say so."""
        told = self.headers.get("x-ratelimit-remaining") == "0" or "retry-after" in self.headers or b"rate limit" in self.body.lower()
        return self.status == 429 or (self.status == 403 and told)

    @property
    def retry_after(self) -> float | None:
        """Seconds until it may be asked again, where the reply says so."""
        stated = self.headers.get("retry-after", "")
        if re.fullmatch(r"[0-9]{1,9}", stated):
            return float(stated)
        try:
            return max(0.0, email.utils.parsedate_to_datetime(stated).timestamp() - time.time())
        except (ValueError, OverflowError):
            return None

    @property
    def limit_ends(self) -> str:
        """When it may be asked again, for people."""
        reset = self.headers.get("x-ratelimit-reset", "")
        when = float(reset) if re.fullmatch(r"[0-9]{1,11}", reset) else None
        if (wait := self.retry_after) is not None:
            when = time.time() + wait
        return "GitHub does not say" if when is None else f"{datetime.datetime.fromtimestamp(when, datetime.UTC):%Y-%m-%d %H:%M:%S} UTC"


def repository_of(url: str) -> tuple[str, str] | None:
    """Return owner and name of the repository at *url* (https, ssh, git, or ssh's short form), or None where GitHub is not its host."""
    found = _URL.fullmatch(url)
    return (found["owner"], found["name"]) if found else None


def one_line(text: str, limit: int, secret: str = "") -> str:
    """Return *text* as one printable line of at most *limit* characters, without terminal commands, and without *secret*."""
    line = " ".join("".join(letter if letter.isprintable() else " " for letter in _TERMINAL.sub("", text)).split())
    # A name of a host comes back in small letters.
    line = re.sub(re.escape(secret), "***", line, flags=re.IGNORECASE) if secret else line
    return line if len(line) <= limit else line[: limit - 1] + "…"


class GitHub:
    """
    GitHub's API, at one address.

    Args:
        address: Where it is; the caller has asked the mirror map.
        token: Empty to ask without one, which is enough for public repositories and a few questions.
        patience: Seconds within which a question is answered or fails, all attempts together.
        longest_wait: Seconds of a rate limit that are waited for; a longer one is an error.

    Raises:
        github-refused: The token has characters that no token has.
    """

    def __init__(self, address: str = ADDRESS, token: str = "", *, patience: float = 60.0, longest_wait: float = 10.0) -> None:
        # requests would show such a token when it refuses to send it.
        if token and not re.fullmatch(r"[!-~]+", token):
            raise GitHubError("github-refused", "The token for GitHub holds a space, a line end or a letter outside ASCII.")
        self.address, self._token = address.rstrip("/"), token
        self.patience, self.longest_wait = patience, longest_wait

    @classmethod
    def from_environment(cls, address: str = ADDRESS, *, patience: float = 60.0, longest_wait: float = 10.0) -> GitHub:
        """Return the API at *address*, asked with the token in ``GITHUB_TOKEN`` or ``GH_TOKEN``; in the clear with none."""
        tokens = (os.environ.get(name, "").strip() for name in ("GITHUB_TOKEN", "GH_TOKEN"))
        where = urlsplit(address)
        # A mirror that is reached in the clear must not carry it over a network.
        safe = where.scheme == "https" or where.hostname in ("localhost", "127.0.0.1", "::1")
        return cls(address, next(filter(None, tokens), "") if safe else "", patience=patience, longest_wait=longest_wait)

    def pull(self, owner: str, name: str, number: int) -> PullRequest:
        """
        Return what GitHub says of pull request *number* now.

        Raises:
            github-unreachable: Nothing came in time, or something that is not GitHub's answer.
            github-refused: The token is wrong, or may not read the repository.
            github-limited: Too much was asked, by this user or from this address.
            pull-request-gone: GitHub has no such pull request.
        """
        where = f"{owner}/{name}#{number}"
        if not re.fullmatch(_REPOSITORY, f"{owner}/{name}") or number < 1:
            raise GitHubError("pull-request-gone", f"GitHub can have no pull request {one_line(where, 200)}.")
        reply = self._ask(f"{self.address}/repos/{owner}/{name}/pulls/{number}", where)
        if reply.status != 200:
            raise self.refusal(reply, where)
        if len(reply.body) > LARGEST:
            raise GitHubError("github-unreachable", f"The answer for {where} is larger than {LARGEST} bytes.")
        try:
            return self._record(msgspec.json.decode(reply.body, type=_Pull), number)
        # msgspec's own errors are ValueErrors; deep nesting and days before the year 1 are not.
        except (ValueError, RecursionError, OverflowError) as error:
            begins = self.shown(reply.body.decode("utf-8", "replace"), 80)
            raise GitHubError(
                "github-unreachable",
                f"What came for {where} is no pull request.",
                details=[self.shown(str(error), 200), f"it begins: {begins}"],
            ) from None

    def _record(self, one: _Pull, number: int) -> PullRequest:
        if one.number != number:
            raise ValueError(f"it is about number {one.number}")
        if one.merged and (one.state == "open" or not one.merge_commit_sha):
            raise ValueError("it says merged, but is open or has no merge commit")
        # Before the merge, merge_commit_sha is a trial that GitHub makes for itself.
        merge = (one.merge_commit_sha or "") if one.merged else ""
        day = one.updated_at.astimezone(datetime.UTC).date().isoformat()
        author = one.user.login if one.user else "ghost"
        title = self.shown(one.title, 300)
        return PullRequest(number, title, author, "merged" if one.merged else one.state, one.head.sha, one.base.ref, merge, day)

    def ask(self, method: str, path: str, where: str, record: object = None) -> Reply:
        """
        Return the reply to one question about *where*, whatever its status is below 500.

        A POST is sent once, since nobody knows whether one without an answer was heard; all else is repeated, as `pull` does.

        Args:
            path: Below the address of the API. *record*: What is sent along, as JSON.

        Raises:
            github-unreachable: Nothing came in time, or too much.
        """
        data = b"" if record is None else msgspec.json.encode(record)
        reply = self._ask(f"{self.address}{path}", where, method, data)
        if len(reply.body) > LARGEST:
            raise GitHubError("github-unreachable", f"The answer for {where} is larger than {LARGEST} bytes.")
        return reply

    def _ask(self, url: str, where: str, method: str = "GET", data: bytes = b"") -> Reply:
        """
        Return the first reply that is more than a passing fault.

        urllib3's Retry does not do: it has no limit of the whole, does not see a body that breaks off, and reads that of a
        500 to its end, if it has one.
        """
        from urllib3.exceptions import HTTPError

        until = time.monotonic() + self.patience
        attempts = 1 if method == "POST" else ATTEMPTS
        for attempt in range(1, attempts + 1):
            pause = self.patience / 200 * 2**attempt
            try:
                reply = self._follow(url, where, until) if method == "GET" else self._bounded(url, until, method, data)
            # Everything of requests is an OSError.
            except (OSError, HTTPError, ValueError) as error:
                broke = self.shown(re.sub(r"(?<=://)[^/\s]*@", "", str(error)), 300)
                if isinstance(error, ValueError):
                    break  # an address that no further attempt makes better
            else:
                wait = reply.retry_after if reply.limited and attempt < attempts else None
                if wait is not None and wait <= min(self.longest_wait, until - time.monotonic()):
                    console.note(f"GitHub asks to wait {wait:.0f} s before it tells of {where}")
                    pause = wait
                elif reply.status < 500:
                    return reply
                broke = f"GitHub answered {reply.status}"
            if attempt == attempts or time.monotonic() + pause >= until:
                break
            console.detail(f"{where}: {broke}; asking again")
            time.sleep(pause)
        raise GitHubError("github-unreachable", f"GitHub does not tell of {where}.", details=[broke, f"attempts: {attempt}"])

    def _follow(self, url: str, where: str, until: float) -> Reply:
        """Return the reply behind redirects, none of which leaves the host."""
        place = url
        for _ in range(1 + REDIRECTS):
            reply = self._bounded(place, until)
            if reply.status not in (301, 302, 303, 307, 308):
                return reply
            place = urljoin(place, reply.headers.get("location", ""))
            if (there := host_of(place)) != host_of(url):
                raise GitHubError(
                    "github-unreachable",
                    f"The question for {where} is sent on to another host.",
                    details=[f"to: {self.shown(there, 200)}", "nothing was asked there"],
                )
        raise GitHubError("github-unreachable", f"The question for {where} is sent on in a circle.")

    def _bounded(self, url: str, until: float, method: str = "GET", data: bytes = b"") -> Reply:
        """
        Return the reply to one request, if it is whole by *until*.

        requests bounds each wait for bytes, but neither their sum nor the look-up of the name; so the waiting is
        done by a thread that the program's end does not wait for.
        """
        future: Future[Reply] = Future()

        def wait() -> None:
            try:
                future.set_result(self._exchange(url, until, method, data))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=wait, name="github", daemon=True).start()
        try:
            return future.result(max(0.0, until - time.monotonic()))
        except TimeoutError:
            raise TimeoutError(f"no whole answer within {self.patience:g} s") from None

    def _exchange(self, url: str, until: float, method: str = "GET", data: bytes = b"") -> Reply:
        """Send one request and read its reply, as it comes over the wire."""
        import requests

        with self.exchange(requests.Request(method, url, data=data or None), self.patience / ATTEMPTS) as reply:
            body = bytearray()
            for piece in reply.raw.stream(1 << 16, decode_content=False):
                body += piece
                if len(body) > LARGEST:
                    break
                if time.monotonic() > until:
                    raise TimeoutError  # nobody waits any more
            return replied(reply, bytes(body[: LARGEST + 1]))

    @contextlib.contextmanager
    def exchange(self, request: requests.Request, wait: float, *, known: bool = True) -> Iterator[requests.Response]:
        """
        Yield the reply to *request*, its body unread; redirects are not followed.

        Args:
            wait: The longest that a byte is waited for, in seconds.
            known: The host may see the token.
        """
        import requests

        with requests.Session() as session:
            # Anything here keeps requests from the passwords in ~/.netrc, and leaves it the environment's proxies.
            session.auth = self._authorize if known else lambda request: request
            session.verify = os.environ.get("PIP_CERT") or os.environ.get("SSL_CERT_FILE") or True
            session.headers.update(_HEADERS)
            prepared = session.prepare_request(request)
            assert prepared.url
            settings = session.merge_environment_settings(prepared.url, {}, True, None, None)
            # The adapter, since the session would read the body of a redirect whole, however long.
            adapter = session.get_adapter(prepared.url)
            with adapter.send(prepared, timeout=wait, **settings) as reply:  # type: ignore[arg-type]  # made for it
                yield reply

    def _authorize(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        if self._token:
            request.headers["Authorization"] = f"Bearer {self._token}"
        return request

    def refusal(self, reply: Reply, where: str) -> SparkwrightError:
        """Return what a *reply* means that does not tell of *where*, a pull request unless it says otherwise."""
        says = [f"GitHub says: {message}"] if (message := self._message(reply.body)) else []
        used = "with a token" if self._token else "without a token"
        if reply.limited:
            todo = "Wait until the limit ends; another token of the same account shares it." if self._token else ""
            details = [f"the limit ends: {reply.limit_ends}", f"asked {used}", *says]
            return GitHubError("github-limited", f"GitHub tells nothing of {where} for now.", details=details, todo=todo)
        details = [f"answered {reply.status}, asked {used}", *says]
        if reply.status in (401, 403):
            todo = "" if self._token else "Set GITHUB_TOKEN to a token that may read the repository."
            return GitHubError("github-refused", f"GitHub refuses to tell of {where}.", details=details, todo=todo)
        if reply.status in (404, 410):
            return GitHubError("pull-request-gone", f"GitHub has no pull request {where}.", details=details)
        return GitHubError("github-unreachable", f"GitHub does not tell of {where}.", details=details)

    @property
    def has_token(self) -> bool:
        return bool(self._token)

    def said(self, reply: Reply) -> str:
        """Return GitHub's own explanation, for people; empty where it gives none."""
        return self._message(reply.body)

    def _message(self, body: bytes) -> str:
        """Return GitHub's own explanation, where *body* has one."""
        try:
            return self.shown(msgspec.json.decode(body, type=_Message).message, 200)
        except (ValueError, RecursionError):
            return ""

    def shown(self, text: str, limit: int) -> str:
        """Return *text* as `one_line`, without the token, which a server might send back."""
        return one_line(text, limit, self._token)


def replied(reply: requests.Response, body: bytes) -> Reply:
    """Return *reply*, of which *body* was read."""
    return Reply(reply.status_code, {name.lower(): value for name, value in reply.headers.items()}, body)


def host_of(url: str) -> str:
    """Return scheme, host and port of *url* as the client will read them; other parsers see other hosts in odd URLs."""
    import requests
    from urllib3.util import parse_url

    parts = parse_url(requests.Request("GET", url).prepare().url or "")
    return f"{parts.scheme}://{parts.host}:{parts.port or {'http': 80, 'https': 443}.get(parts.scheme or '')}"

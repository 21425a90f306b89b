"""What is asked of the reference server: completions and chats, their tokens, and the events that answer them."""

from __future__ import annotations

import re
import time
import zlib
from typing import Annotated, Any

import msgspec

from sparkwright.bench.load.reference.behaviour import Behaviour
from sparkwright.bench.load.reference.question import Refused

Token = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


#: What `word` makes of a token.
_OWN = re.compile(r"t[0-9]{1,10}")


class StreamOptions(msgspec.Struct):
    """``stream_options``."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class Part(msgspec.Struct):
    """A part of a message."""

    text: str = ""


class Message(msgspec.Struct):
    """A message of a chat."""

    role: str = ""
    content: str | list[Part] | None = None


class Body(msgspec.Struct):
    """The fields of both protocols that change what is answered; others are passed over."""

    model: str = ""
    prompt: str | list[Token | str] | None = None
    messages: list[Message] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    min_tokens: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None


def word(token: int) -> str:
    """Return the text of *token*."""
    return f" t{token}"


def tokenized(text: str, vocabulary: int) -> list[int]:
    """Return the tokens of *text*, one for each word; those of `word` come back as they were."""
    found = [int(part[1:]) if _OWN.fullmatch(part) else zlib.crc32(part.encode("utf-8", "replace")) % vocabulary for part in text.split()]
    return [token % 2**31 for token in found] or [0]


def _text(body: Body) -> str:
    parts = []
    for message in body.messages or ():
        content = message.content or ""
        parts.append(content if isinstance(content, str) else " ".join(part.text for part in content))
    return "\n".join(parts)


def _prompt(given: str | list[int | str] | None, vocabulary: int) -> list[int]:
    """Return the tokens of a prompt; of a list of texts there is to be one."""
    if isinstance(given, list) and len(given) == 1 and isinstance(given[0], str):
        given = given[0]
    if isinstance(given, str) and given:
        return tokenized(given, vocabulary)
    codes = [one for one in given or () if isinstance(one, int)]
    if not codes or len(codes) != len(given or ()):
        raise Refused(400, "the prompt is empty, or several")
    return codes


class Asked:
    """
    One question for tokens.

    Attributes:
        prompt: Its tokens. *tokens*: how many are wanted. *chat*: whether as a chat. *stream*: whether event by event.
        usage: Whether the stream is to tell it at its end; *running*: whether in each event as well.

    Raises:
        Refused: It cannot be answered: another model, too long, or not in the form of the protocol.
    """

    def __init__(self, data: bytes, behaviour: Behaviour, number: int, *, chat: bool) -> None:
        try:
            body = msgspec.json.decode(data, type=Body)
        except (ValueError, RecursionError) as error:
            raise Refused(400, f"the question cannot be read: {error!s:.200}") from None
        self._behaviour, self.chat = behaviour, chat
        if body.model and body.model != behaviour.name:
            raise Refused(404, f"The model `{body.model[:100]}` does not exist.")
        self.prompt = _prompt(_text(body) if chat else body.prompt, behaviour.vocabulary)
        self.tokens = body.max_completion_tokens or body.max_tokens or 16
        if self.tokens < 1 or len(self.prompt) + self.tokens > behaviour.limit:
            raise Refused(400, f"{len(self.prompt)} tokens and {self.tokens} more do not fit into {behaviour.limit}")
        self.stream = body.stream
        options = body.stream_options or StreamOptions()
        self.usage, self.running = options.include_usage, options.continuous_usage_stats
        self._codes = bool(body.return_token_ids)
        self._id = f"{'chatcmpl' if chat else 'cmpl'}-{number:08}"
        self._created = int(time.time())
        self._first = zlib.crc32(repr(self.prompt).encode())

    def code(self, place: int) -> int:
        """Return the token at *place* of the answer, a function of the prompt."""
        return 256 + (self._first + place * 7919) % (self._behaviour.vocabulary - 256)

    def counted(self, tokens: int) -> dict[str, int]:
        """Return the usage of an answer with that many *tokens*."""
        return {"prompt_tokens": len(self.prompt), "total_tokens": len(self.prompt) + tokens, "completion_tokens": tokens}

    def _envelope(self, choices: list[dict[str, Any]], *, stream: bool, **more: object) -> bytes:
        kind = ("chat.completion" if self.chat else "text_completion") + (".chunk" if self.chat and stream else "")
        return msgspec.json.encode(
            {"id": self._id, "object": kind, "created": self._created, "model": self._behaviour.name, "choices": choices, **more}
        )

    def part(self, place: int, size: int, finish: str | None) -> bytes:
        """Return the event with the *size* tokens from *place* on."""
        codes = [self.code(place + one) for one in range(size)]
        text = "".join(map(word, codes))
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finish}
        if self.chat:
            choice["delta"] = {"role": "assistant", "content": text} if place == 0 else {"content": text}
        else:
            choice |= {"text": text, "stop_reason": None}
        if self._codes:
            choice["token_ids"] = codes
            if place == 0:
                choice["prompt_token_ids"] = self.prompt
        more = {"usage": self.counted(place + size)} if self.running else {}
        return self._envelope([choice], stream=True, **more)

    def end(self, tokens: int) -> bytes:
        """Return the event that tells the usage."""
        return self._envelope([], stream=True, usage=self.counted(tokens))

    def answer(self, tokens: int, counted: int, finish: str) -> bytes:
        """Return the whole answer, with *tokens* of which *counted* are told."""
        codes = [self.code(place) for place in range(tokens)]
        text = "".join(map(word, codes))
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finish}
        choice |= {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
        if self._codes:
            choice |= {"token_ids": codes, "prompt_token_ids": self.prompt}
        return self._envelope([choice], stream=False, usage=self.counted(counted))

"""
A server that speaks as vLLM does, of a model of bytes whose distributions a test can damage.

The model guesses the next byte from the last one, and knows some texts by heart. Its answers follow
from its logits (prefill, decode, greedy, sampled, prefix cache, drafts), so a test that changes the
logits of some steps makes a server that is wrong in exactly that way.
"""

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from tests.support import loopback

from sparkwright.bench.server.client import Client

Floats = NDArray[np.float64]
#: Ends a text.
END = 4
#: In the words of vLLM 0.32.0.
NOT_A_NUMBER = {"error": {"message": "Out of range float values are not JSON compliant", "code": 400}}
BLOCK = 16


class Step(msgspec.Struct, frozen=True):
    """
    A step of the model.

    Attributes:
        tokens: All tokens before the one that is predicted.
        decoded: How many of them were generated; 0 in prefill.
        cached: How many of the prompt came from the prefix cache.
        running: How many requests are answered at this moment.
    """

    tokens: list[int]
    decoded: int
    cached: int
    running: int


Damage = Callable[[Floats, Step], Floats]
Message = dict[str, Any]


class ByteModelServer(loopback.Server):
    """
    A server that runs in its ``with`` block.

    Attributes:
        memory: Texts that are known by heart: the beginning, and what follows.
        damage: Changes the logits of a step.
        sharpen: The temperature that the sampler multiplies with the one it was asked for.
        config: Of the generation_config.json: what a request leaves out of top_k, top_p and repetition_penalty, which change what is drawn, and
            no logprob.
        caches: Whether it says that it has a prefix cache.
        drafts: Whether tokens are drafted; *acceptance*: the share that is accepted; *careless*: each of so many greedy tokens is a draft that
            should have been refused, or none if it is 0.
        chats: The message that answers a chat, by its question; the second is how it ends.
        talk: Answers another chat: from the request, its tokens that came from the prefix cache, and the requests that are answered now.
        template: Whether there is a chat template.
        answer: Changes a complete reply that holds scores.
    """

    daemon_threads = True

    def __init__(self, memory: Mapping[str, str] | None = None, chats: Mapping[str, tuple[Message, str]] | None = None) -> None:
        super().__init__(_Handler)
        self.logits: Floats = np.random.default_rng(1).standard_normal((256, 256)) * 2
        self.memory = {key.encode(): value.encode() + bytes([END]) for key, value in (memory or {}).items()}
        self.chats = dict(chats or {})
        self.damage: Damage = lambda logits, step: logits
        self.answer: Callable[[Message], object] = lambda reply: reply
        self.caches, self.version, self.config = True, "0.0.0", dict[str, float]()
        self.talk, self.template, self.chatted = sound_talk, True, dict[str, str]()
        self.sharpen, self.drafts, self.acceptance, self.careless = 1.0, False, 0.8, 0
        self.name, self.limit, self.shift = "bytes", 4096, 0
        self.counts, self.lock = Counter[str](), threading.Lock()
        self.stored: dict[str, list[list[int]]] = {}

    @property
    def client(self) -> Client:
        return Client(self.url, deadline=60)

    def logprobs(self, step: Step) -> Floats:
        """Return the logarithms of the probabilities of all bytes after those of *step*."""
        logits = self.logits[step.tokens[-1]].copy()
        text = bytes(step.tokens[-4000:]) if self.memory else b""
        for beginning, rest in self.memory.items():
            at = text.rfind(beginning, max(0, len(text) - len(beginning) - len(rest)))
            done = text[at + len(beginning) :]
            if at >= 0 and len(done) < len(rest) and rest.startswith(done):
                logits[rest[len(done)]] += 14
        logits = self.damage(logits, step)
        top = logits.max()
        found: Floats = (logits - top - np.log(np.exp(logits - top).sum())).astype(np.float32).astype(np.float64)
        return found

    def reuse(self, salt: str, prompt: list[int]) -> int:
        """Store *prompt* in the prefix cache, and return how many of its tokens were there."""
        with self.lock:
            stored = self.stored.setdefault(salt, [])
            shared = [
                next((i for i, (a, b) in enumerate(zip(old, prompt, strict=False)) if a != b), min(len(old), len(prompt))) for old in stored
            ]
            stored.append(prompt)
            hits = max(shared, default=0) // BLOCK * BLOCK
            self.counts["vllm:prefix_cache_hits_total"] += hits
        return hits


class _Handler(loopback.Handler):
    server: ByteModelServer
    disable_nagle_algorithm = True

    def _send(self, reply: object, status: int = 200, kind: str = "") -> None:
        body = reply.encode() if isinstance(reply, str) else reply
        self.answer(status, body, Content_Type=kind or ("application/json" if body is reply else "text/html"))

    def do_GET(self) -> None:  # noqa: N802  http.server calls it so
        own = self.server
        if self.path == "/metrics":
            cache = f'vllm:cache_config_info{{block_size="{BLOCK}",enable_prefix_caching="{own.caches}"}}'
            drafts = {"vllm:spec_decode_num_drafts_total": 0} if own.drafts else {}
            counts = {"vllm:corrupted_requests_total": 0, "vllm:prefix_cache_hits_total": 0, cache: 1.0, **drafts, **own.counts}
            return self._send("".join(f"{name} {value}\n" for name, value in counts.items()), kind="text/plain")
        models = {"data": [{"id": own.name, "max_model_len": own.limit}]}
        return self._send(models if self.path == "/v1/models" else {"version": own.version})

    def do_POST(self) -> None:  # noqa: N802  http.server calls it so
        request = json.loads(self.body())
        own = self.server
        if self.path == "/tokenize":
            return self._send({"tokens": [(byte + own.shift) % 256 for byte in request["prompt"].encode()]})
        with own.lock:
            own.counts["running"] += 1
        try:
            reply = (self._chat if "chat" in self.path else self._completion)(request)
        finally:
            with own.lock:
                own.counts["running"] -= 1
        return self._send(reply, 400) if "error" in reply else self._send(own.answer(reply))

    def _chat(self, request: Message) -> Message:
        own, content = self.server, request["messages"][-1]["content"]
        parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
        image = "".join(part["image_url"]["url"] for part in parts if part["type"] == "image_url")
        question = image or parts[-1]["text"]
        if not own.template:
            # In the words of vLLM 0.33.0 with transformers 5.
            reason = "Cannot use chat template functions because tokenizer.chat_template is not set and no template argument was passed!"
            return {"error": {"message": reason, "code": 400}}
        salt = request.get("cache_salt", "")
        with own.lock:
            stored = own.chatted.get(salt, "")
            own.chatted.setdefault(salt, question)
            shared = (at for at, (a, b) in enumerate(zip(stored, question, strict=False)) if a != b)
            cached = next(shared, min(len(stored), len(question))) // BLOCK * BLOCK if own.caches else 0
            own.counts["vllm:prefix_cache_hits_total"] += cached
        message, finish = own.chats.get(question) or own.talk(request, cached, own.counts["running"])
        # vLLM 0.32.0 sends null for what was not asked for.
        choice = {"index": 0, "message": message, "finish_reason": finish, "token_ids": None, "logprobs": None}
        return {"model": own.name, "choices": [choice], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}

    def _completion(self, request: Message) -> Message:
        own, prompt = self.server, request["prompt"]
        prompt = list(prompt.encode()) if isinstance(prompt, str) else prompt
        if len(prompt) + request["max_tokens"] > own.limit:
            return {"error": {"message": "too long", "code": 400}}
        scored, top = request.get("prompt_logprobs"), request.get("logprobs")
        choice: Message = {"index": 0, "prompt_token_ids": prompt}
        if scored is not None:
            steps = [Step(prompt[:at], 0, 0, own.counts["running"]) for at in range(1, len(prompt))]
            rows = [own.logprobs(step) for step in steps]
            if any(np.isnan(row).any() for row in rows):
                return NOT_A_NUMBER
            pairs = zip(prompt[1:], rows, strict=True)
            choice["prompt_logprobs"] = [
                None,
                *({str(at): {"logprob": float(row[at])} for at in [token, *_best(row, scored)]} for token, row in pairs),
            ]
        tokens, names, finish = self._generate(request, prompt, top)
        choice |= {
            "text": bytes(token for token in tokens if token != END).decode("utf-8", "replace"),
            "token_ids": tokens,
            "finish_reason": finish,
        }
        if top is not None:
            if any(value is None for row in names for value in row.values()):
                return NOT_A_NUMBER
            own_logprobs = [row[f"token_id:{token}"] for token, row in zip(tokens, names, strict=True)]
            choice["logprobs"] = {
                "tokens": [f"token_id:{token}" for token in tokens],
                "token_logprobs": own_logprobs,
                "top_logprobs": names,
            }
        return {"model": own.name, "choices": [choice], "usage": {"prompt_tokens": len(prompt), "completion_tokens": len(tokens)}}

    def _generate(self, request: Message, prompt: list[int], top: int | None) -> tuple[list[int], list[dict[str, float | None]], str]:
        own = self.server
        cached = 0 if request.get("prompt_logprobs") is not None else own.reuse(request.get("cache_salt", ""), prompt)
        if top is not None:
            # Requests that come at the same time are all there when the first is answered.
            time.sleep(0.01)
        running = own.counts["running"]
        draw = np.random.default_rng(request.get("seed", 0))
        temperature = request["temperature"] * own.sharpen
        tokens: list[int] = []
        names: list[dict[str, float | None]] = []
        while len(tokens) < request["max_tokens"]:
            row = own.logprobs(Step([*prompt, *tokens], len(tokens), cached, running))
            if np.isnan(row).any():
                token = 0
            elif temperature:
                chances = _kept(np.exp(self._penalised(row, request, [*prompt, *tokens]) / temperature), {**own.config, **request})
                token = int(draw.choice(256, p=chances / chances.sum()))
            else:
                refused = own.careless and len(tokens) % own.careless == own.careless - 1
                token = _best(self._penalised(row, request, [*prompt, *tokens]), 2)[1 if refused else 0]
            tokens.append(token)
            if top is not None:
                names.append({f"token_id:{at}": None if np.isnan(row[at]) else float(row[at]) for at in {token, *_best(row, top)}})
            if own.drafts:
                with own.lock:
                    own.counts["vllm:spec_decode_num_drafts_total"] += 1
                    own.counts["vllm:spec_decode_num_draft_tokens_total"] += 100
                    own.counts["vllm:spec_decode_num_accepted_tokens_total"] += round(100 * own.acceptance)
            if token == END and not request.get("ignore_eos"):
                return tokens, names, "stop"
        return tokens, names, "length"

    def _penalised(self, row: Floats, request: Message, seen: list[int]) -> Floats:
        """Return *row*, in which the tokens *seen* are less probable by the repetition_penalty."""
        row = row.copy()
        row[seen] *= {"repetition_penalty": 1.0, **self.server.config, **request}["repetition_penalty"]
        return row


def _kept(chances: Floats, settings: Message) -> Floats:
    """Return *chances* without those that top_k and top_p leave out."""
    order = np.argsort(-chances, kind="stable")
    least = np.cumsum(chances[order]) - chances[order] >= settings.get("top_p", 1.0) * chances.sum()
    least |= np.arange(len(order)) >= (settings.get("top_k", 0) or len(order))
    return np.where(np.isin(np.arange(len(order)), order[least]), 0, chances)


def called(arguments: object) -> Message:
    """Return a message that calls the tool."""
    function = {"name": "record_delivery", "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments)}
    return {"tool_calls": [{"index": 0, "id": "1", "function": function}]}


def sound_talk(request: Message, cached: int, running: int) -> tuple[Message, str]:
    """Answer in one of several wordings, as samples differ; a tool that is offered is called."""
    question, seed = request["messages"][-1]["content"], request["seed"]
    number = next((word for word in question.split()[::-1] if word.isdigit()), "3")
    if request.get("tools"):
        arguments = json.dumps({"town": ("Lisbon", "Oslo", "Bergen")[seed % 3], "crates": int(number), "urgent": seed % 2 > 0})
        return called(arguments), "tool_calls"
    words = ("a heron", "two boats", "the old mill", "a bench", "reeds", "a wooden ferry", "wild geese")
    return {"content": f"One sees {words[seed % 7]}, {words[seed % 5]} and, after {number} minutes, {words[seed % 3]}."}, "stop"


def only(condition: Callable[[Step], bool], change: Damage = lambda logits, _: logits[::-1]) -> Damage:
    """Return *change*, by default another order of the tokens, for the steps of *condition* alone."""
    return lambda logits, step: change(logits, step) if condition(step) else logits


def ended(length: int, of: int) -> Callable[[Message], object]:
    """Return what ends each answer *of* so many tokens after *length* tokens."""

    def answer(reply: Message) -> object:
        choice = reply["choices"][0]
        if len(choice.get("token_ids") or ()) == of:
            choice["finish_reason"], choice["token_ids"] = "stop", choice["token_ids"][:length]
            choice["logprobs"] = {key: value[:length] for key, value in choice["logprobs"].items() if isinstance(value, list)}
            reply["usage"]["completion_tokens"] = length
        return reply

    return answer


def _best(row: Floats, top: int) -> list[int]:
    return [int(at) for at in np.argsort(-row, kind="stable")[:top]] if top else []

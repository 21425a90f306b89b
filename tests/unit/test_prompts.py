"""Files of real prompts: ShareGPT's JSON, JSON lines, and files that are neither."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest
from tests.refusals import refusal

from sparkwright.bench.load import prompts
from sparkwright.core.store import Store

QUESTION = "How do I make a paper crane? [1] \\ \"2\" \u00e9\U0001f600"


def conversation(*turns: tuple[object, object]) -> dict[str, object]:
    return {"id": "x", "conversations": [{"from": who, "value": text} for who, text in turns]}


#: What people have: answered questions of people, and entries that no benchmark can use.
ENTRIES = [
    conversation(("human", QUESTION), ("gpt", "Fold it.")),
    conversation(("gpt", QUESTION), ("human", "Thanks.")),
    conversation(("human", QUESTION)),
    conversation(("human", "Hi"), ("gpt", "Hello.")),
    conversation(("human", "long " * 20_000), ("gpt", "Yes.")),
    conversation(("human", 7), ("gpt", "Yes.")),
    {"id": "y", "conversations": "none"},
    conversation(("user", "A half \ud800 of a pair"), ("gpt", "Odd.")),
]


@pytest.mark.parametrize("chunk", [7, 1 << 20])
@pytest.mark.parametrize(("begin", "indent"), [("", None), ("\n \n", 2)])
def test_first_turns_of_answered_conversations_are_extracted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], chunk: int, begin: str, indent: int | None
) -> None:  # fmt: skip
    monkeypatch.setattr(prompts, "CHUNK", chunk)
    path, store = tmp_path / "sharegpt.json", Store(tmp_path / "store")
    path.write_text(begin + json.dumps(ENTRIES, indent=indent))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    lines = prompts.prompt_file(path, store)
    assert lines
    written = [json.loads(line) for line in lines.read_text("utf-8").splitlines()]
    assert written == [{"prompt": QUESTION}, {"prompt": "A half ? of a pair"}]
    assert f"2 usable prompts, sha256 {digest}, another file than any of workloads.yaml" in capsys.readouterr().err
    made = lines.stat().st_mtime_ns
    assert prompts.prompt_file(path, store, digest) == lines
    assert lines.stat().st_mtime_ns == made
    assert "as ordered" in capsys.readouterr().err
    assert prompts.prompt_file(path, store, known={digest: "sharegpt"}) == lines
    assert "the expected file of sharegpt" in capsys.readouterr().err


def test_file_of_prompts_is_taken_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "Why?"}\n')
    assert prompts.prompt_file(path, Store(tmp_path / "store")) == path


@pytest.mark.parametrize(
    ("data", "detail"),
    [
        (b"", "there is none"),
        (b'{"data": []}', "missing required field `prompt`"),
        (b'{"prompt": ' + b"[" * 100_000, ""),
        (b'{"prompt": "Why?"}\n\n{"prompt": "How?"}\n', "line 2: "),
        (b'{"prompt": "Why?"}\n{"x": 1}\n', "line 2: "),
        (b"[]", "no first turn"),
        (b"[{}]", "no first turn"),
        (b"[1, 2]", "no first turn"),
        (b"[{}", "Expecting value"),
        (b"[{}, what", "Expecting value"),
        (b'[{"conversations": [{"from": "human"', ""),
        (b'[{"conversations": ' + b"[" * 200_000, "recursion"),
        (b'[{"id": ' + b"9" * 10_000 + b"}]", "digits"),
        (b'[{"id": "' + b"x" * (10 << 20) + b'"}]', "Unterminated string"),
        (b"[\xff]", "utf-8"),
    ],
)  # fmt: skip
def test_other_structure_is_refused(tmp_path: Path, data: bytes, detail: str) -> None:
    path, store = tmp_path / "hostile.json", Store(tmp_path / "store")
    path.write_bytes(data)
    with refusal("file-invalid") as caught:
        prompts.prompt_file(path, store)
    assert detail in str(caught.value.details)
    assert not list(store.folder("prompts").iterdir())


def test_other_hash_and_no_file_are_refused(tmp_path: Path) -> None:
    path, store = tmp_path / "sharegpt.json", Store(tmp_path / "store")
    path.write_text(json.dumps(ENTRIES))
    with refusal("file-invalid", match="not the expected file"):
        prompts.prompt_file(path, store, "0" * 64)
    os.mkfifo(tmp_path / "pipe")
    for missing in (tmp_path / "none", tmp_path / "pipe", tmp_path):
        with refusal("file-invalid", match="no regular file"):
            prompts.prompt_file(missing, store)

"""Known traps: every record of ``ci/traps.yaml`` is met by what it describes, and by nothing beside it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from sparkwright.bench.recipes import recipe, traps
from sparkwright.bench.recipes.traps import ModelFacts

ROOT = Path(__file__).parents[2]
DRAFTS = '--speculative-config={"method":"mtp","num_speculative_tokens":2%s}'
FACTS = ModelFacts("qwen3_next", "NVFP4 (modelopt)", 128, 256, drafts=True)
GPT = ModelFacts("gpt_oss", "MXFP4", 32, 64, drafts=False)

#: Trap → arguments, release and facts that meet it, and the same but for one, which does not.
CASES: dict[str, list[tuple[list[str], str, ModelFacts, bool]]] = {
    "mxfp4-triton": [
        (["--moe-backend=triton"], "0.33.0+spark.2026.11.p0.cu130", GPT, True),
        (["--moe_backend", "triton_unfused"], "0.40.0", GPT, True),
        (["--moe-backend=triton"], "0.32.1", GPT, False),
        (["--moe-backend=triton"], "", GPT, False),
        (["--moe-backend=triton"], "0.33.0", FACTS, False),
        (["--moe-backend=triton", "--moe-backend=marlin"], "0.33.0", GPT, False),
    ],
    "b12x-experts": [
        (["--moe-backend=flashinfer_b12x"], "0.33.0", ModelFacts(experts=512), True),
        (["--moe-backend=flashinfer_b12x"], "0.33.0", ModelFacts(experts=256), False),
        (["--moe-backend=marlin"], "0.33.0", ModelFacts(experts=512), False),
    ],
    "draft-b12x": [
        ([DRAFTS % "", "--moe-backend=b12x"], "0.33.0", FACTS, True),
        (["--spec-model=a/b", "--moe-backend=b12x"], "0.33.0", FACTS, True),
        ([DRAFTS % ',"moe_backend":"triton"', "--moe-backend=b12x"], "0.33.0", FACTS, False),
        (["--speculative-config.method=ngram", "--moe-backend=b12x"], "0.33.0", FACTS, False),
    ],
    "speculation-headless": [
        ([DRAFTS % ""], "0.33.0", ModelFacts(drafts=False), True),
        ([DRAFTS % ""], "0.33.0", ModelFacts(), False),
        ([DRAFTS % ',"model":"a/b"'], "0.33.0", ModelFacts(drafts=False), False),
    ],
    "nvfp4-kv-head-64": [
        (["--kv-cache-dtype=nvfp4"], "0.33.0", ModelFacts("llama", head_size=64), True),
        (["--kv-cache-dtype=nvfp4"], "0.33.0", ModelFacts("llama", head_size=128), False),
        (["--kv-cache-dtype=fp8"], "0.33.0", ModelFacts("llama", head_size=64), False),
    ],
    "nvfp4-kv-sinks": [
        (["--kv-cache-dtype", "nvfp4"], "0.33.0", ModelFacts("gpt_oss"), True),
        (["--kv-cache-dtype", "nvfp4"], "0.33.0", FACTS, False),
    ],
    "mla-projection": [
        ([], "0.23.0", ModelFacts("glm4_moe_lite", "INT (compressed-tensors)"), True),
        ([], "0.33.0", ModelFacts("glm4_moe_lite", "INT (compressed-tensors)"), False),
        ([], "0.23.0", ModelFacts("glm4_moe_lite", "NVFP4 (modelopt)"), False),
    ],
    "draft-head-gemma": [
        ([DRAFTS % ',"draft_lm_head_quantization":"fp8"'], "0.33.0", ModelFacts("gemma4_text"), True),
        ([DRAFTS % ',"draft_lm_head_quantization":"fp8"'], "0.33.0", FACTS, False),
    ],
    "draft-head-method": [
        (['--speculative-config={"method":"dflash","model":"a/b","draft_lm_head_quantization":"fp8"}'], "0.33.0", FACTS, True),
        (['--speculative-config={"method":"eagle3","model":"a/b","draft_lm_head_quantization":"fp8"}'], "0.33.0", FACTS, False),
        ([DRAFTS % ',"draft_lm_head_quantization":"nvfp4"'], "0.33.0", FACTS, False),
    ],
}  # fmt: skip


@pytest.mark.parametrize("trap", traps.load(), ids=lambda trap: trap.id)
def test_trap_holds_for_what_it_describes_and_nothing_beside(trap: traps.Trap) -> None:
    cases = CASES[trap.id]
    assert {met for *_, met in cases} == {True, False}
    for words, vllm, facts, met in cases:
        assert (trap.id in {each.reference for each in traps.find(words, vllm, facts)}) == met, words


def test_recipes_meet_no_trap() -> None:
    """With the arguments of each release that a recipe knows."""
    for name in recipe.names(ROOT):
        spec = recipe.load(ROOT, name)
        facts = ModelFacts(spec.model.architecture, spec.model.quantization, drafts=spec.model.drafts is not False)
        for version in ("0.20.1", "0.23.0", "0.33.0"):
            if variant := spec.find_variant(version):
                words = [*variant.flags, f"--speculative-config={msgspec.json.encode(spec.drafting(variant)).decode()}"]
                assert not [trap.reference for trap in traps.find(words, version, facts)], name

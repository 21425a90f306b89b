"""
What the small model of the tests (`trained`) learns by heart, its tokenizer, and its shape.

With random weights nothing can be asked about meaning. The model knows the continuations of the prompts of G4, so every check of the
gate has a sound original, and a fault of the server that changes words makes right answers wrong.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

#: A chat needs room for an answer of 4096 tokens; what is learnt lies within the first thousand.
VOCABULARY, LONGEST, SEED = 640, 8192, 1
#: Tokens that are learnt of each answer: some more than the gate asks for, so that the end is not in sight.
LEARNT = 216

#: Type of transformers → what its model has.
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 32, "rms_norm_eps": 1e-5},
    # Kernels for gated delta nets and for Mamba-2 want the heads of the published models.
    "qwen3_next": {
        "hidden_size": 256, "num_hidden_layers": 4, "head_dim": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "num_experts": 8,
        "num_experts_per_tok": 2, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128,
    },
    "nemotron_h": {
        "hidden_size": 256, "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"], "head_dim": 64, "mamba_num_heads": 8,
        "mamba_head_dim": 64, "n_groups": 2, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128,
        "moe_shared_expert_intermediate_size": 128,
    },
}  # fmt: skip

#: The continuation of each prompt, by its name.
TEXTS = Path(__file__).with_name("learnt_texts.yaml")
#: The prompts, in the folder of the gates' policies.
POLICY = "generation.yaml"


def tokenizer(folder: Path, texts: list[str], vocabulary: int = VOCABULARY, longest: int = LONGEST, **settings: str) -> Any:
    """Write a byte-level tokenizer to *folder*, whose code 0 is ``!`` as in GPT-2's, and return it; *settings* are further ones."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=vocabulary - 2, initial_alphabet=alphabet, show_progress=False))
    # Special ones come last, so that code 0 stays "!".
    made.add_special_tokens(["<s>", "</s>"])
    made.save(str(folder / "tokenizer.json"))
    own = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "model_max_length": longest, **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(own))
    return made


def rows(made: Any, gates: Path) -> list[tuple[list[int], int]]:
    """Return each prompt and each question for a fact with its answer as tokens, and how many of them are the prompt's."""
    from sparkwright.gates.long_text import filled_text

    policy: Any = json.loads(json.dumps(yaml.safe_load((gates / POLICY).read_text("utf-8"))), object_hook=lambda fields: SimpleNamespace(**fields))
    policy.facts = vars(policy.facts)
    answers = yaml.safe_load(TEXTS.read_text("utf-8"))
    (length,) = policy.profiles.learnt.context
    long = filled_text(policy, "{prompt}", length, lambda text: len(made.encode(text).ids))
    asked = {name: prompt.text for name, prompt in vars(policy.prompts).items()} | {name: long + fact.text for name, fact in policy.facts.items()}
    short, found = set(policy.facts), []
    for name, text in asked.items():
        prompt, said = made.encode(text).ids, made.encode(answers[name]).ids
        if len(said) < (24 if name in short else LEARNT):
            raise SystemExit(f"the answer of {name} has {len(said)} tokens, too few")
        found.append((prompt + said[:LEARNT], len(prompt)))
    return found


def model(kind: str) -> Any:
    """Return a model of random numbers: a Llama of half a million parameters, or a hybrid with experts of some millions."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(SEED)
    config = AutoConfig.for_model(
        kind, **SHAPES[kind], num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=LONGEST, vocab_size=VOCABULARY,
        tie_word_embeddings=False, bos_token_id=VOCABULARY - 2, eos_token_id=VOCABULARY - 1,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


class Drafts:
    """
    The layer of a Qwen3-Next that drafts (MTP): from a token and the state before it, the token behind it.

    Its weights have the names that vLLM reads.
    """

    def __init__(self, net: Any) -> None:
        import torch
        from transformers import AutoModel

        config = type(net.config)(**{**net.config.to_dict(), "num_hidden_layers": 1, "layer_types": ["full_attention"]})
        self._net, width = net, config.hidden_size
        layer = AutoModel.from_config(config)
        norm = type(layer.norm)
        self.modules = torch.nn.ModuleDict(
            {"layer": layer, "pre_fc_norm_embedding": norm(width), "pre_fc_norm_hidden": norm(width), "fc": torch.nn.Linear(2 * width, width, bias=False)}
        ).to(net.device)

    def loss(self, inputs: Any) -> Any:
        """Return how far the drafts are from *inputs*; the model behind them does not learn from it."""
        import torch

        table = self._net.get_input_embeddings()
        with torch.no_grad():
            states = self._net.model(input_ids=inputs).last_hidden_state[:, :-2]
        parts = self.modules["pre_fc_norm_embedding"](table(inputs[:, 1:-1]).detach()), self.modules["pre_fc_norm_hidden"](states)
        drafted = self.modules["layer"](inputs_embeds=self.modules["fc"](torch.cat(parts, -1))).last_hidden_state
        logits = torch.nn.functional.linear(drafted, self._net.get_output_embeddings().weight.detach())
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), inputs[:, 2:].flatten())

    def tensors(self) -> dict[str, Any]:
        """Return the weights by the names that vLLM reads."""
        weights = self.modules.state_dict()
        return {
            f"mtp.{name.removeprefix('layer.')}": weight.bfloat16().contiguous() for name, weight in weights.items() if "embed_tokens" not in name and "rotary" not in name
        }


def batches(learnt: list[tuple[list[int], int]]) -> list[tuple[Any, Any]]:
    """Return the rows as batches of inputs and labels, the long ones apart, so that little is padded; of a prompt only the end counts."""
    import torch

    made = []
    for group in ([row for row in learnt if len(row[0]) < 400], [row for row in learnt if len(row[0]) >= 400]):
        width = max((len(ids) for ids, _ in group), default=0)
        inputs = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in group])
        labels = torch.tensor([[-100] * asked + ids[asked:] + [-100] * (width - len(ids)) for ids, asked in group])
        made += [(inputs, labels)] if group else []
    return made


def loss(net: Any, inputs: Any, labels: Any, smoothing: float = 0.05) -> Any:
    """Return how far the model *net* is from *labels*, smoothed, so that it is not sure of every token."""
    import torch

    return torch.nn.CrossEntropyLoss(label_smoothing=smoothing)(net(input_ids=inputs).logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

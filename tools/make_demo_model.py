"""Makes the demo's base model: a small Qwen3 decoder that half knows how to add with a calculator.

    python tools/make_demo_model.py --out services/ops/assets/demo

Writes a Hugging Face folder: config.json, generation_config.json, model.safetensors (float32), tokenizer.json,
tokenizer_config.json. Everything follows from --seed; the weights are the same again on the same build of torch and
the same kind of processor, and equally good elsewhere.

The model is trained, supervised, on demonstrations of the demo's task (services/ops/workload.py), of which CORRUPTED
are wrong in ways that reinforcement learning can unlearn: an operand copied wrongly, an answer given too early, a
guess instead of a tool call, two operations in one call. It learns both ways well, so that sampled at temperature 1
its mean reward starts near 1 - CORRUPTED, at every length. Lengths go up to the longest task: the drift of the demo's
workload asks for nothing that the model has never seen.
"""

import argparse
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from services.ops import workload
from services.toolenv.envs import arithmetic

SPECIAL = ["<pad>", "<bos>", "<eos>", "<call>", "</call>", "<out>", "</out>", "<ans>", "</ans>"]
CHARACTERS = "0123456789+-*/()= .,:?abcdefghijklmnopqrstuvwxyz\n'_<>%"
UNKNOWN = "<unk>"
VOCABULARY = {token: i for i, token in enumerate([*SPECIAL, *CHARACTERS, UNKNOWN])}

MAX_POSITIONS = 512
STEPS = 900
DEMONSTRATIONS = 64
"""Demonstrations of one step."""

LEARNING_RATE = 3e-3
WARMUP_STEPS = 50
CORRUPTED = 0.51
"""Share of wrong demonstrations. Gives a mean reward of 0.54 at the start, 0.51 to 0.56 over four held-out files: some
wrong ways still end in the right answer."""

TIMEOUT_SHARE = 0.01
"""Share of tool calls that are shown to time out; the demonstration then calls again."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One id for each character and each special token; ids are VOCABULARY's."""
    tokenizer = Tokenizer(models.WordLevel(vocab=VOCABULARY, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",  # noqa: S106 - tokens of a vocabulary
        bos_token="<bos>",  # noqa: S106
        eos_token="<eos>",  # noqa: S106
        unk_token=UNKNOWN,
        additional_special_tokens=SPECIAL[3:],
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def make_model(seed: int) -> Qwen3ForCausalLM:
    """The untrained model: 3 layers, width 128, 4 heads, 2 KV heads, about 0.5 million parameters, float32."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(VOCABULARY),
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        initializer_range=0.05,
        pad_token_id=VOCABULARY["<pad>"],
        bos_token_id=VOCABULARY["<bos>"],
        eos_token_id=VOCABULARY["<eos>"],
        dtype="float32",
    )
    return Qwen3ForCausalLM(config).to(torch.float32)


class Demonstration:
    """One episode as token ids and the mask of those that the model is to say itself."""

    def __init__(self, question: str) -> None:
        self.ids = [VOCABULARY["<bos>"], *_ids(question)]
        self.mask = [0] * len(self.ids)

    def call(self, expression: str, max_ops: int = 1) -> str:
        """Calls the calculator, as the environment would answer."""
        self._say("<call>", expression, "</call>")
        try:
            output = arithmetic.evaluate(expression, max_ops).text
        except arithmetic.ExpressionError as error:
            output = f"error: {error}"
        self._read(output)
        return output

    def time_out(self, expression: str) -> None:
        """A call that the environment cut off."""
        self._say("<call>", expression, "</call>")
        self._read("timeout")

    def answer(self, text: str) -> None:
        self._say("<ans>", text, "</ans>")
        self.ids.append(VOCABULARY["<eos>"])
        self.mask.append(1)

    def _say(self, begin: str, text: str, end: str) -> None:
        self._add([VOCABULARY[begin], *_ids(text), VOCABULARY[end]], 1)

    def _read(self, output: str) -> None:
        self._add([VOCABULARY["<out>"], *_ids(output), VOCABULARY["</out>"]], 0)

    def _add(self, ids: Sequence[int], mask: int) -> None:
        self.ids.extend(ids)
        self.mask.extend([mask] * len(ids))


def demonstrate(rng: random.Random) -> Demonstration:
    """A random task with a right or, in CORRUPTED of all cases, a wrong way to answer it."""
    operations = _operations(rng)
    terms, totals = workload.expression(rng, operations)
    demonstration = Demonstration("".join(terms) + "=?")
    ways = ["copy", "copy", "early", "guess", "double"] if operations > 1 else ["copy", "early", "guess"]
    corruption = rng.choice(ways) if rng.random() < CORRUPTED else ""
    # "double" takes the operation after as well
    where = rng.randint(1, operations - (corruption == "double"))
    value = terms[0]
    if corruption == "guess":
        demonstration.answer(str(max(0, totals[-1] + rng.choice([-1, 1]) * rng.randint(1, 60))))
        return demonstration
    for i, term in enumerate(terms[1:], start=1):
        if corruption == "early" and i == where:
            break
        if corruption == "double" and i == where:
            demonstration.call(value + term + terms[i + 1])
            break
        written = _miscopied(term, rng) if corruption == "copy" and i == where else term
        if rng.random() < TIMEOUT_SHARE:
            demonstration.time_out(value + written)
        value = demonstration.call(value + written)
    demonstration.answer(value)
    return demonstration


def _operations(rng: random.Random) -> int:
    draw = rng.random()
    if draw < 0.45:
        return rng.randint(1, 6)
    if draw < 0.70:
        return rng.randint(6, 12)
    return rng.randint(12, workload.LONGEST)


def _miscopied(term: str, rng: random.Random) -> str:
    """The term with another second digit or the other sign."""
    if rng.random() < 0.3:
        return ("-" if term[0] == "+" else "+") + term[1:]
    return term[:-1] + rng.choice([d for d in "0123456789" if d != term[-1]])


def _ids(text: str) -> list[int]:
    return [VOCABULARY[c] for c in text]


def warm_start(model: Qwen3ForCausalLM, seed: int) -> None:
    """STEPS steps of AdamW with linear warm-up and decay; prints the loss, in nats per token, every 50 steps."""
    rng = random.Random(f"demonstrations/{seed}")  # noqa: S311 - data, no secret
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    began = time.monotonic()
    for step in range(STEPS):
        rate = LEARNING_RATE * min((step + 1) / WARMUP_STEPS, 1.0 - step / STEPS + 1e-3)
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = _step(model, [demonstrate(rng) for _ in range(DEMONSTRATIONS)])
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 50 == 49:
            print(f"step {step + 1:4d}  loss {loss:.4f}  {time.monotonic() - began:.0f} s", flush=True)


def _step(model: Qwen3ForCausalLM, batch: list[Demonstration]) -> float:
    """Adds the gradient of the mean loss over the batch; in parts of like length, since lengths differ tenfold."""
    batch = sorted(batch, key=lambda d: len(d.ids))
    total = sum(sum(d.mask) for d in batch)
    loss_sum = 0.0
    for start in range(0, len(batch), 8):
        part = batch[start : start + 8]
        width = max(len(d.ids) for d in part)
        ids = torch.tensor([d.ids + [0] * (width - len(d.ids)) for d in part])
        mask = torch.tensor([d.mask + [0] * (width - len(d.mask)) for d in part])
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        loss = (losses * mask[:, 1:].flatten()).sum() / total
        loss.backward()
        loss_sum += loss.item()
    return loss_sum


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Make the demo's base model.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write; created if missing")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = make_model(arguments.seed)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    warm_start(model, arguments.seed)
    arguments.out.mkdir(parents=True, exist_ok=True)
    # sampling defaults of the task belong to the run, not to the model
    model.generation_config = GenerationConfig(
        pad_token_id=VOCABULARY["<pad>"], bos_token_id=VOCABULARY["<bos>"], eos_token_id=VOCABULARY["<eos>"]
    )
    model.save_pretrained(arguments.out)
    make_tokenizer().save_pretrained(arguments.out)
    origin = {"made_by": "tools/make_demo_model.py", "seed": arguments.seed, "steps": STEPS, "torch": torch.__version__}
    (arguments.out / "origin.json").write_text(json.dumps(origin, indent=2) + "\n")


if __name__ == "__main__":
    main()

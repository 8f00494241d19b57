"""A tiny random Qwen3 with a character tokenizer, in Hugging Face format; seeded, written once to a folder."""

from pathlib import Path

SPECIAL = ("<pad>", "<bos>", "<eos>", "<call>", "</call>", "<out>", "</out>", "<ans>", "</ans>")
CHARACTERS = "0123456789+-*/()= .,:?_abcdefghijklmnopqrstuvwxyz\"'{}<>"
UNKNOWN = "<unk>"


def write_tokenizer(folder: Path) -> int:
    """Writes tokenizer.json and its configuration; returns the vocabulary's size."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *CHARACTERS, UNKNOWN])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([*SPECIAL, UNKNOWN])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token=UNKNOWN,
        additional_special_tokens=list(SPECIAL[3:]),
    )
    fast.save_pretrained(folder)
    return len(vocabulary)


def write_tiny_model(
    folder: str | Path,
    *,
    seed: int = 0,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    context: int = 256,
    spread: float = 1.0,
) -> Path:
    """Writes config.json, model.safetensors and the tokenizer; a model that is already there is kept.

    `spread` scales the random logits: about 1 gives a broad next-token distribution that still prefers some tokens.
    """
    folder = Path(folder)
    if (folder / "model.safetensors").exists():
        return folder
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    size = write_tokenizer(folder)
    config = Qwen3Config(
        vocab_size=size,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden // heads,
        max_position_embeddings=context,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config).to(torch.float32)
        with torch.no_grad():
            model.lm_head.weight.normal_(0.0, spread / hidden**0.5 * 1.5)
            for layer in model.model.layers:
                layer.self_attn.o_proj.weight.normal_(0.0, 1.5 / hidden**0.5)
                layer.mlp.down_proj.weight.normal_(0.0, 1.5 / hidden**0.5)
            model.model.embed_tokens.weight.normal_(0.0, 1.0)
    model.save_pretrained(folder)
    return folder

"""The demo's model as it lies in the repository: what the rollout and trainer services rely on."""

from pathlib import Path

import pytest

from services.ops import workload

FOLDER = Path(workload.__file__).parent / "assets" / "demo"
SPECIAL = ["<pad>", "<bos>", "<eos>", "<call>", "</call>", "<out>", "</out>", "<ans>", "</ans>"]


@pytest.fixture(scope="module")
def tokenizer():
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(FOLDER, local_files_only=True)


def test_files_are_small():
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < 5_000_000


def test_special_tokens(tokenizer):
    assert tokenizer.convert_tokens_to_ids(SPECIAL) == list(range(9))
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)


def test_one_id_a_character_and_back(tokenizer):
    text = "31+14-20=? error: at most 1 operator\n(timeout) x*y/z, a.b"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) == len(text)
    assert min(ids) >= len(SPECIAL)
    assert tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids) == text
    episode = "<bos>1+2=?<call>1+2</call><out>3</out><ans>3</ans><eos>"
    assert tokenizer.decode(tokenizer.encode(episode, add_special_tokens=False)) == episode


def test_unknown_characters_do_not_break(tokenizer):
    assert tokenizer.encode("Ü", add_special_tokens=False) == [tokenizer.unk_token_id]


def test_the_model_calls_the_tool_with_the_next_operand(tokenizer):
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    model = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, local_files_only=True).eval()
    assert model.config.model_type == "qwen3"
    assert model.dtype == torch.float32
    assert model.config.max_position_embeddings == 512
    assert 400_000 < sum(p.numel() for p in model.parameters()) < 700_000
    prompt = "<bos>31+14-20+55=?<call>31+14</call><out>45</out><call>"
    ids = torch.tensor([tokenizer.encode(prompt, add_special_tokens=False)])
    with torch.no_grad():
        said = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=6)
    assert tokenizer.decode(said[0, ids.shape[1] :]) == "45-20</call>"

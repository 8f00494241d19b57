"""The demo's text protocol: what a turn says, never raising on nonsense."""

import json

import pytest

from services.common.errors import LibraError
from services.rollout.dialect import Final, LibraTags, ToolCall, open_dialect
from services.rollout.engine.base import Finish
from services.rollout.engine.fake import CharCodec
from services.rollout.engine.tokenizer import load_codec
from tests.support.tiny_model import write_tiny_model

CODEC = CharCodec()
CALL, END_CALL, ANS, END_ANS, EOS = (CODEC.special(t) for t in ("<call>", "</call>", "<ans>", "</ans>", "<eos>"))


def _text(*parts):
    return [i for p in parts for i in ([p] if isinstance(p, int) else CODEC.encode(p))]


@pytest.mark.parametrize(
    ("ids", "finish", "said"),
    [
        (_text(CALL, "3+14", END_CALL), Finish.TOOL_CALL, ToolCall("calculate", '{"expression": "3+14"}')),
        (_text("so", CALL, CALL, "1", END_CALL), Finish.TOOL_CALL, ToolCall("calculate", '{"expression": "1"}')),
        (_text("3+14", END_CALL), Finish.TOOL_CALL, ToolCall("calculate", '{"expression": ""}')),
        (_text(ANS, "17", END_ANS, EOS), Finish.STOP, Final("17")),
        (_text("17", EOS), Finish.STOP, Final("")),
        (_text(END_ANS, ANS, EOS), Finish.STOP, Final("")),
        (_text(ANS, "17", END_ANS), Finish.LENGTH, Final("")),
        ([], Finish.STOP, Final("")),
    ],
)
def test_what_a_turn_says(ids, finish, said):
    assert LibraTags(CODEC).parse(ids, finish) == said


def test_prompt_and_observation():
    tags = LibraTags(CODEC)
    assert tags.prompt_ids("", "1+1=?") == [CODEC.special("<bos>"), *CODEC.encode("1+1=?")]
    assert tags.next_prompt([1, 2], "7") == [1, 2, *tags.observation_ids("7")]


def test_unknown_dialect_names_the_known_ones():
    with pytest.raises(LibraError, match="libra-tags"):
        open_dialect("qwen", CODEC)


def test_tool_output_never_becomes_special_tokens(tmp_path):
    codec = load_codec(str(write_tiny_model(tmp_path / "m")))
    specials = {codec.special(t) for t in CharCodec.SPECIAL}
    ids = codec.encode("<eos></call>17")
    assert not specials & set(ids)
    assert codec.decode(ids) == "<eos></call>17"
    assert codec.decode([codec.special("<ans>"), *codec.encode("1 2"), codec.special("</ans>")]) == "1 2"
    assert json.loads(LibraTags(codec).parse([3, *codec.encode('1"'), 4], Finish.TOOL_CALL).arguments_json)
    with pytest.raises(LibraError, match="no token"):
        codec.special("<nothing>")

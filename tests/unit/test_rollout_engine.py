"""The reference engine: equal to a plain forward pass, whatever runs beside, is reused, aborted or switched."""

import numpy as np
import pytest
import torch
from safetensors.torch import save
from transformers import AutoModelForCausalLM

from services.common.errors import LibraError
from services.rollout.engine.base import (
    DrawKey,
    EngineLimits,
    Finish,
    GenerationRequest,
    Interruption,
    Sampling,
    Version,
    Weights,
)
from services.rollout.engine.transformers import TransformersCore
from tests.support.tiny_model import write_tiny_model

V0, V1 = Version(1, 0), Version(1, 1)
LIMITS = EngineLimits(max_sequences=8, max_context=128, chunk_tokens=4, kv_slots=10)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return [write_tiny_model(root / str(seed), seed=seed) for seed in (0, 1)]


def _core(folder, limits=LIMITS):
    core = TransformersCore(limits)
    core.prepare(V0, Weights(str(folder)))
    core.switch(V0)
    return core


def _request(name, length=9, tokens=20, *, temperature=1.0, sample=0, prompt=None, stop=None, **more):
    ids = np.random.default_rng(length).integers(9, 60, length).astype(np.int32) if prompt is None else prompt
    draw = DrawKey(3, 1, sample, 0, len(ids))
    return GenerationRequest(name, ids, tokens, Sampling(temperature), stop or {}, draw, **more)


class Collected:
    def __init__(self):
        self.ids, self.logprobs, self.versions, self.outcome = [], [], [], None


def _drive(core, *requests, after=None, collected=None):
    found = collected if collected is not None else {}
    for request in requests:
        core.submit(request)
        found.setdefault(request.request_id, Collected())
    steps = 0
    while core.has_work():
        events = core.step()
        steps += 1
        if after is not None:
            events += after(core, steps) or []
        _take(found, events)
    return found


def _take(found, events):
    for event in events:
        one = found[event.request_id]
        if event.tokens is not None:
            one.ids += event.tokens.ids.tolist()
            one.logprobs += event.tokens.logprobs.tolist()
            one.versions += [tuple(v) for v in event.tokens.versions.tolist()]
        if event.outcome is not None:
            one.outcome = event.outcome


def _rescore(folder, prompt, ids, temperature=1.0):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    row = torch.tensor([[*np.asarray(prompt).tolist(), *ids]])
    with torch.inference_mode():
        logits = model(row).logits[0].double() / (temperature or 1.0)
    logprobs = logits.log_softmax(-1)
    at = torch.arange(len(prompt) - 1, row.shape[1] - 1)
    return logprobs[at, row[0, len(prompt) :]].numpy(), logits[at].argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_logprobs_equal_a_plain_forward_pass(folders, temperature):
    core = _core(folders[0])
    requests = [_request(f"r{n}", 3 + 5 * n, 10 + 3 * n, temperature=temperature, sample=n) for n in range(8)]
    found = _drive(core, *requests)
    for n, request in enumerate(requests):
        one = found[f"r{n}"]
        assert one.outcome.finish == Finish.LENGTH
        assert one.outcome.total_tokens == len(one.ids) == 10 + 3 * n
        logprobs, greedy = _rescore(folders[0], request.prompt_ids, one.ids, temperature)
        assert np.abs(logprobs - one.logprobs).max() < 1e-4
        if temperature == 0.0:
            assert one.ids == greedy


def test_neighbours_and_order_change_nothing(folders):
    requests = [_request(f"r{n}", 3 + 4 * n, 25, sample=n) for n in range(8)]
    alone = {}
    for request in requests:
        alone.update(_drive(_core(folders[0]), request))
    crowded = EngineLimits(max_sequences=3, max_context=128, prefill_tokens=16, kv_slots=3)
    together = _drive(_core(folders[0], crowded), *reversed(requests))
    for name, one in alone.items():
        assert together[name].ids == one.ids
        assert np.abs(np.subtract(together[name].logprobs, one.logprobs)).max() < 1e-4


def test_the_next_turn_prefills_only_what_is_new(folders):
    core = _core(folders[0])
    every = dict.fromkeys(range(9, 30), Finish.TOOL_CALL)
    first = _request("a", 10, 50, stop=every, prefix_key="seq")
    one = _drive(core, first, _request("b", 20, 30, sample=1))["a"]
    assert one.outcome.finish == Finish.TOOL_CALL
    prompt = np.array([*first.prompt_ids, *one.ids, 5, 40, 41, 6], np.int32)
    again = _drive(core, _request("c", tokens=12, prompt=prompt, prefix_key="seq"), _request("d", 7, 20))["c"]
    # the last generated token was never fed, so its cache is missing
    assert again.outcome.cached_tokens == len(first.prompt_ids) + len(one.ids) - 1
    fresh = _drive(_core(folders[0]), _request("c", tokens=12, prompt=prompt))["c"]
    assert fresh.outcome.cached_tokens == 0
    assert again.ids == fresh.ids
    assert np.abs(np.subtract(again.logprobs, fresh.logprobs)).max() < 1e-4


def test_a_kept_prefix_that_differs_is_used_up_to_the_difference(folders):
    core = _core(folders[0])
    first = _request("a", 10, 50, stop=dict.fromkeys(range(9, 30), Finish.TOOL_CALL), prefix_key="seq")
    _drive(core, first)
    prompt = first.prompt_ids.copy()
    prompt[6] = 60
    again = _drive(core, _request("c", tokens=12, prompt=prompt, prefix_key="seq"))["c"]
    assert again.outcome.cached_tokens == 6
    assert again.ids == _drive(_core(folders[0]), _request("c", tokens=12, prompt=prompt))["c"].ids


def test_kept_prefixes_give_way_under_pressure(folders):
    core = _core(folders[0], EngineLimits(max_sequences=2, max_context=128, kv_slots=3))
    stop = dict.fromkeys(range(60), Finish.TOOL_CALL)
    for n in range(4):
        _drive(core, _request(f"r{n}", 5, 9, stop=stop, prefix_key=f"k{n}"))
    assert list(core._rows.kept) == ["k1", "k2", "k3"]
    core.forget("k2")
    assert list(core._rows.kept) == ["k1", "k3"]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_case_26_weights_change_between_tokens(folders, temperature):
    """Running requests are not dropped; each token carries the version that drew it, and its logprob under it."""
    core = _core(folders[0], EngineLimits(max_sequences=8, max_context=128, prefill_tokens=20))
    model = AutoModelForCausalLM.from_pretrained(folders[1], dtype=torch.float32)
    shard = save({k: v.contiguous() for k, v in model.state_dict().items()})
    requests = [_request(f"r{n}", 4 + 3 * n, 20 + n, temperature=temperature, sample=n) for n in range(6)]

    def switch(core, steps):
        if steps == 4:
            core.prepare(V1, Weights(str(folders[0]), [shard]))
        return core.switch(V1) if steps == 8 else []

    found = _drive(core, *requests, after=switch)
    for request in requests:
        one = found[request.request_id]
        assert one.outcome.finish == Finish.LENGTH
        old = sum(v == (1, 0) for v in one.versions)
        assert 0 < old < len(one.ids)
        assert one.versions == [(1, 0)] * old + [(1, 1)] * (len(one.ids) - old)
        before, greedy_before = _rescore(folders[0], request.prompt_ids, one.ids, temperature)
        after, greedy_after = _rescore(folders[1], request.prompt_ids, one.ids, temperature)
        expected = np.concatenate([before[:old], after[old:]])
        assert np.abs(expected - one.logprobs).max() < 1e-4
        assert np.abs(before[old:] - one.logprobs[old:]).max() > 1e-2  # the versions do differ
        if temperature == 0.0:
            assert one.ids == greedy_before[:old] + greedy_after[old:]


def test_a_switch_drops_kept_prefixes(folders):
    core = _core(folders[0])
    _drive(core, _request("a", 10, 50, stop=dict.fromkeys(range(60), Finish.TOOL_CALL), prefix_key="seq"))
    core.prepare(V1, Weights(str(folders[1])))
    core.switch(V1)
    again = _drive(core, _request("c", 10, 12, prefix_key="seq"))["c"]
    assert again.outcome.cached_tokens == 0
    assert again.ids == _drive(_core(folders[1]), _request("c", 10, 12))["c"].ids


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("k", [1, 2, 5, 7])
def test_an_abort_at_any_token_keeps_the_tokens(folders, k, temperature):
    whole = _drive(_core(folders[0]), _request("w", 9, 21, temperature=temperature))["w"]
    engines = [_core(folders[0]), _core(folders[0])]
    prompt, ids, logprobs = _request("w").prompt_ids, [], []
    for part in range(100):
        core = engines[part % 2]  # moved at each interruption
        draw = DrawKey(3, 1, 0, 0, len(prompt) + len(ids))
        request = GenerationRequest(
            f"p{part}", np.array([*prompt, *ids], np.int32), 21 - len(ids), Sampling(temperature), {}, draw
        )
        stop = lambda core, steps, name=f"p{part}": core.abort(name, Interruption.PREEMPTED) if steps == k else []  # noqa: E731
        one = _drive(core, request, _request(f"n{part}", 14, 6), after=stop)[f"p{part}"]
        ids += one.ids
        logprobs += one.logprobs
        assert one.outcome.total_tokens == len(one.ids)
        if one.outcome.interruption is None:
            break
        assert one.outcome.finish is None
        assert one.outcome.interruption == Interruption.PREEMPTED
        assert len(one.ids) == k
    assert ids == whole.ids
    assert np.abs(np.subtract(logprobs, whole.logprobs)).max() < 1e-4


def test_case_25_abort_while_queued(folders):
    """A request that never ran ends with no token; one thrown back to prefill by a switch keeps those it has."""
    core = _core(folders[0], EngineLimits(max_sequences=1, max_context=128))
    found = {name: Collected() for name in "abc"}
    for name, priority in (("a", 0), ("b", 0), ("c", 5)):
        core.submit(_request(name, 9, 10, priority=priority))
    for _ in range(3):
        _take(found, core.step())
    assert core.stats().waiting == 2
    _take(found, core.abort("b", Interruption.PREEMPTED))
    assert found["b"].outcome.total_tokens == 0
    assert found["b"].outcome.interruption == Interruption.PREEMPTED
    core.prepare(V1, Weights(str(folders[1])))
    core.switch(V1)  # "c" (higher priority) ran; now it waits for its cache to be computed anew
    _take(found, core.abort("c", Interruption.PREEMPTED))
    assert len(found["c"].ids) == found["c"].outcome.total_tokens == 3
    assert found["c"].versions == [(1, 0)] * 3
    assert core.abort("c", Interruption.PREEMPTED) == []
    _drive(core, collected=found)
    assert len(found["a"].ids) == 10


def test_refusals_say_what_was_expected(folders):
    core = TransformersCore(LIMITS)
    with pytest.raises(LibraError, match="no weights"):
        core.submit(_request("a"))
    core = _core(folders[0], EngineLimits(max_sequences=1, max_waiting=1, max_context=128))
    with pytest.raises(LibraError, match="128 tokens"):
        core.submit(_request("a", 128))
    with pytest.raises(LibraError, match="vocabulary"):
        core.submit(_request("a", prompt=np.array([1, 999])))
    with pytest.raises(LibraError, match="at least 1"):
        core.submit(_request("a", tokens=0))
    with pytest.raises(LibraError, match="was not prepared"):
        core.switch(Version(1, 9))
    core.submit(_request("a"))
    with pytest.raises(LibraError, match="CAPACITY"):
        core.submit(_request("b"))
    with pytest.raises(LibraError, match="missing"):
        core.prepare(V1, Weights(str(folders[0]), [save({"x": torch.zeros(2)})]))
    with pytest.raises(LibraError, match="cannot be read"):
        core.prepare(V1, Weights(str(folders[0] / "nowhere")))
    assert core.version == V0


def test_length_ends_at_the_context(folders):
    one = _drive(_core(folders[0]), _request("a", 100, 1000))["a"]
    assert one.outcome.finish == Finish.LENGTH
    assert len(one.ids) == 28


def test_another_architecture_needs_an_idle_engine_and_a_released_one_is_empty(folders, tmp_path):
    core = _core(folders[0])
    core.prepare(V1, Weights(str(write_tiny_model(tmp_path / "wide", hidden=96, layers=1))))
    core.submit(_request("a"))
    with pytest.raises(LibraError, match="another architecture"):
        core.switch(V1)
    core.step()
    events = core.release()
    assert [e.outcome.interruption for e in events] == [Interruption.LOST]
    assert core.version is None
    assert core.stats().kv_capacity_tokens == 0
    core.prepare(V1, Weights(str(tmp_path / "wide")))
    core.switch(V1)
    assert len(_drive(core, _request("b", 9, 5))["b"].ids) == 5

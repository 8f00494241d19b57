"""Laws of modelled times: what more work, more devices, more memory and slower links do, for every shipped profile."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.errors import ConfigError
from services.simulator import profiles
from services.simulator.hardware import Extra
from services.simulator.steptimes import ModelledEngine, decode_terms
from services.simulator.trainingtimes import ModelledTraining

MACHINES = ["a100-modelled", "a800-paper", "h100-80gb", "h800-80gb", "h200-141gb", "cpu-slot"]
MODELS = ["qwen3-4b", "qwen3-8b", "qwen3-14b", "qwen3-32b", "qwen3-30b-a3b"]
TPS = [1, 2, 4, 8]
ENGINES = {
    (machine, model): ModelledEngine(profiles.profile(machine).hardware, profiles.model(model))
    for machine in MACHINES
    for model in MODELS
}

engines = st.sampled_from(sorted(ENGINES)).map(ENGINES.get)
tps = st.sampled_from(TPS)
sequences = st.integers(1, 512)
contexts = st.floats(0, 4e6)


def engine(machine="a100-modelled", model="qwen3-14b", **changes):
    known = ENGINES.get((machine, model)) or ModelledEngine(profiles.profile(machine).hardware, profiles.model(model))
    return ModelledEngine(dataclasses.replace(known.hardware, **changes), known.model)


def training(machine="a100-modelled", model="qwen3-14b", **changes):
    hardware = ENGINES[machine, model].hardware
    changed = dataclasses.replace(hardware.operations.training, **changes)
    operations = dataclasses.replace(hardware.operations, training=changed)
    return ModelledTraining(dataclasses.replace(hardware, operations=operations), ENGINES[machine, model].model)


# ---- engines


@given(engines, tps, sequences, sequences, contexts)
def test_a_step_of_more_sequences_never_ends_sooner(one, tp, few, more, context):
    assert one.decode_s(tp, few, context) < one.decode_s(tp, few + more, context)


@given(engines, tps, sequences, contexts, st.floats(1.0, 1e6))
def test_a_step_over_more_context_never_ends_sooner(one, tp, count, context, more):
    assert one.decode_s(tp, count, context) < one.decode_s(tp, count, context + more)


@given(engines, tps, sequences, sequences, contexts, contexts)
def test_one_step_of_two_batches_takes_no_longer_than_two_steps(one, tp, a, b, at_a, at_b):
    together = one.decode_s(tp, a + b, at_a + at_b)
    assert together < one.decode_s(tp, a, at_a) + one.decode_s(tp, b, at_b)


@given(engines, tps, st.floats(1, 3e4), st.floats(1, 3e4), st.floats(0, 3e4))
def test_prefill_in_two_parts_costs_what_one_costs_and_a_second_launch(one, tp, first, second, cached):
    whole = one.prefill_s(tp, first + second, cached)
    parts = one.prefill_s(tp, first, cached) + one.prefill_s(tp, second, cached + first)
    assert whole < parts <= whole + one.prefill_s(tp, 1e-9, 0.0) + one.prefill_s(tp, 1e5, 0.0)


@given(engines, tps, st.floats(1, 3e4), st.floats(0, 3e4), st.floats(1, 1e4))
def test_prefill_takes_longer_behind_more_cached_tokens_and_for_more_new_ones(one, tp, new, cached, more):
    assert one.prefill_s(tp, new, cached) < one.prefill_s(tp, new, cached + more)
    assert one.prefill_s(tp, new, cached) < one.prefill_s(tp, new + more, cached)


@given(engines, st.sampled_from([1, 2, 4]))
def test_twice_the_tp_halves_the_reading_of_weights_and_their_arithmetic(one, tp):
    narrow = decode_terms(one.hardware.accelerator, one.model, tp)
    wide = decode_terms(one.hardware.accelerator, one.model, 2 * tp)
    for name in ("dense_read", "expert_read", "arithmetic"):
        assert wide[name] == pytest.approx([x / 2 for x in narrow[name]])
    assert wide["collective_bytes"][1] > narrow["collective_bytes"][1]


def test_a_single_device_waits_for_no_other():
    terms = decode_terms(engine().hardware.accelerator, engine().model, 1)
    assert terms["collective_s"] == terms["collective_bytes"] == (0, 0, 0, 0)


def test_kv_heads_are_replicated_where_tp_exceeds_them():
    moe = profiles.model("qwen3-30b-a3b")
    assert moe.kv_bytes_per_token(4) == moe.kv_bytes_per_token() / 4 == moe.kv_bytes_per_token(8)


def test_one_token_touches_its_own_experts_and_a_large_batch_nearly_all():
    moe = profiles.model("qwen3-30b-a3b")
    assert moe.touched_share(1) == pytest.approx(moe.experts_per_token / moe.experts)
    assert moe.touched_share(512) == pytest.approx(1.0)
    assert profiles.model("qwen3-14b").touched_share(64) == 0


def test_reading_experts_is_what_makes_a_larger_batch_of_a_mixture_slower():
    moe = engine(model="qwen3-30b-a3b")
    read = moe.model.expert_parameters * 2 / moe.hardware.accelerator.hbm_bytes_s
    assert moe.decode_s(1, 16, 0) - moe.decode_s(1, 1, 0) > read * (
        moe.model.touched_share(16) - moe.model.touched_share(1)
    )


def test_nothing_to_do_takes_no_time():
    assert engine().decode_s(1, 0, 0) == engine().prefill_s(1, 0, 1e4) == 0


# ---- memory


@given(engines, tps)
def test_kv_capacity_is_positive_where_a_model_fits_and_refused_where_not(one, tp):
    if one.fits(tp):
        capacity = one.kv_tokens(tp)
        assert capacity > 0
        assert one.fits(tp, capacity)
        assert not one.fits(tp, capacity + 2)
    else:
        with pytest.raises(ConfigError, match=r"does not fit on \d+ x .*GB.*raise tp"):
            one.kv_tokens(tp)


@given(engines, st.sampled_from([1, 2, 4]))
def test_more_devices_hold_more_than_proportionally_more_kv(one, tp):
    if one.fits(tp) and tp < one.model.kv_heads:
        assert one.kv_tokens(2 * tp) > 2 * one.kv_tokens(tp)


def test_the_smallest_tp_that_holds_a_trajectory_grows_with_the_model():
    assert engine("a800-paper", "qwen3-14b").smallest_tp(40_960) == 1
    assert engine("a800-paper", "qwen3-32b").smallest_tp(1) == 2
    assert engine("a100-modelled", "qwen3-32b").smallest_tp(40_960) == 2


def test_a_model_that_no_tp_holds_is_refused():
    accelerator = dataclasses.replace(engine().hardware.accelerator, hbm_bytes=1e9)
    with pytest.raises(ConfigError, match="does not fit"):
        engine(accelerator=accelerator).smallest_tp()


@pytest.mark.parametrize("tp", [0, -1])
def test_an_impossible_tp_is_refused(tp):
    with pytest.raises(ConfigError, match="expected at least 1"):
        engine().kv_tokens(tp)


# ---- what a cluster has on top


@given(tps, sequences, contexts)
def test_an_empty_extra_changes_nothing(tp, count, context):
    assert engine(extra=Extra()).decode_s(tp, count, context) == engine().decode_s(tp, count, context)


@given(tps, sequences)
def test_slow_collectives_and_a_step_penalty_cost_several_devices_alone(tp, count):
    slow = engine(extra=Extra(collective_bytes_s=5e9, tp_step_s=0.01))
    added = slow.decode_s(tp, count, 0) - engine().decode_s(tp, count, 0)
    assert added == 0 if tp == 1 else added > 0.01
    if tp > 1:
        assert slow.prefill_s(tp, 1_000, 0) > engine().prefill_s(tp, 1_000, 0) + 0.01


def test_a_step_penalty_is_so_many_seconds_whatever_the_model():
    for model in MODELS:
        slow = engine(model=model, extra=Extra(tp_step_s=0.02))
        assert slow.decode_s(4, 7, 0) - engine(model=model).decode_s(4, 7, 0) == pytest.approx(0.02)


def test_a_smaller_share_of_memory_leaves_less_kv():
    assert engine(extra=Extra(memory_fraction=0.5)).kv_tokens(1) < engine().kv_tokens(1) / 2


# ---- moves


@given(engines, st.floats(1, 1e5))
def test_a_kv_move_takes_longer_across_nodes_and_for_more_tokens(one, tokens):
    assert one.kv_move_s(tokens, same_node=True) < one.kv_move_s(tokens, same_node=False)
    assert one.kv_move_s(tokens, same_node=False) < one.kv_move_s(tokens + 1, same_node=False)


def test_a_weight_update_takes_longer_to_more_nodes_but_not_in_proportion():
    one, two, many = (engine().weight_update_s(8, n) for n in (8, 16, 256))
    assert one < two < many < 2 * one


def test_sleeping_is_bounded_by_the_devices_link_and_then_by_the_host():
    alone, two, all_eight = (engine(model="qwen3-32b").sleep_s(tp) for tp in (1, 2, 8))
    copy = engine().hardware.operations.host_copy
    assert two < alone
    assert all_eight == pytest.approx(copy.base_s + engine(model="qwen3-32b").model.weight_bytes / copy.host_bytes_s)
    assert engine().wake_s(4) == engine().sleep_s(4)


def test_waking_is_far_faster_than_starting():
    assert engine().wake_s(1) < engine().load_s(1) / 5


def test_the_cpu_slot_decodes_as_the_engines_bench_measured():
    slot = engine("cpu-slot", "demo")
    for count, tokens_per_s in ((8, 1_539), (20, 3_312), (48, 5_075)):  # docs/performance.md, one whole core
        assert count / slot.decode_s(1, count, 0.0) == pytest.approx(0.45 * tokens_per_s, rel=0.06)


# ---- training

LENGTHS = st.lists(st.integers(1, 40_960), min_size=1, max_size=40)


@given(LENGTHS, st.randoms(use_true_random=False))
def test_the_order_of_sequences_does_not_matter(lengths, random):
    mixed = random.sample(lengths, len(lengths))
    assert training().step_s(2, 8, mixed) == pytest.approx(training().step_s(2, 8, lengths))


@given(LENGTHS, st.integers(1, 40_960))
def test_a_further_sequence_never_makes_one_replica_faster(lengths, more):
    assert training().step_s(1, 8, lengths) <= training().step_s(1, 8, [*lengths, more])


@given(st.integers(1, 8), st.integers(1, 2_000))
def test_the_same_tokens_in_longer_sequences_take_longer(count, length):
    compute = training(micro_batch_tokens=10**9)
    assert compute.work_flops([length * 2] * count) > compute.work_flops([length] * 2 * count)


def test_work_is_eight_operations_per_parameter_and_token_and_attention():
    tokens, model = 1_000, profiles.model("qwen3-14b")
    linear = 8 * (model.parameters - model.embedding_parameters) * tokens
    quadratic = 4 * 2 * model.layers * model.heads * model.head_dim * tokens**2
    assert training().work_flops([tokens]) == pytest.approx(linear + quadratic)


def test_a_long_step_takes_its_operations_at_the_mfu():
    lengths = [20_000] * 64
    at_peak = training().work_flops(lengths) / (8 * training().hardware.accelerator.flops)
    assert training().step_s(1, 8, lengths) == pytest.approx(at_peak / 0.4, rel=0.01)


def test_more_replicas_are_faster_but_not_in_proportion():
    one, two, four = (training().step_s(n, 8, [4_000] * 64) for n in (1, 2, 4))
    assert one / 2 < two < one
    assert two / 2 < four < two


def test_replicas_on_several_nodes_reduce_their_gradients_over_the_network():
    one, two, four = (training().step_s(n, 8, [1_000] * n) for n in (1, 2, 4))
    sent = 4 * profiles.model("qwen3-14b").parameters / 8  # bytes of each device's share
    rate = 25e9 * training().hardware.operations.training.link_efficiency
    assert two - one == pytest.approx(sent / rate)  # 2 (r - 1) / r of it, as a ring
    assert four - one == pytest.approx(1.5 * sent / rate)


def test_pipeline_stages_idle_less_with_more_micro_batches():
    staged, flat = training(pipeline_stages=4), training()
    few, many = [40_960] * 4, [40_960] * 64

    def idle(lengths):
        return staged.step_s(1, 8, lengths) / flat.step_s(1, 8, lengths) - 1

    assert idle(few) == pytest.approx(0.75, rel=0.01)
    assert idle(many) == pytest.approx(3 / 64, rel=0.01)


def test_micro_batches_are_packed_and_no_sequence_is_split():
    """Where gathering bounds, time counts micro-batches: two sequences of three fifths of a budget do not share one."""
    bound = training(micro_batch_tokens=500)
    assert bound.step_s(1, 16, [300] * 6) == pytest.approx(bound.step_s(1, 16, [500] * 6))
    assert bound.step_s(1, 16, [250] * 6) == pytest.approx(bound.step_s(1, 16, [500] * 3))


def test_small_micro_batches_are_bound_by_gathering_weights():
    lengths = [500] * 64
    assert training(micro_batch_tokens=500).step_s(1, 16, lengths) > 2 * training().step_s(1, 16, lengths)


@pytest.mark.parametrize("machine", MACHINES[:-1])
@pytest.mark.parametrize("model", MODELS)
def test_the_smallest_replica_holds_its_state_and_half_of_it_does_not(machine, model):
    trainer = training(machine, model)
    memory, count = trainer.hardware.operations.memory, trainer.min_accelerators()
    usable = memory.fraction * trainer.hardware.accelerator.hbm_bytes
    tokens = trainer.hardware.operations.training.micro_batch_tokens
    needed = trainer.state_bytes + trainer.activation_bytes(tokens)
    assert needed / count + memory.reserved_bytes <= usable
    assert count == 1 or needed / (count / 2) + memory.reserved_bytes > usable


def test_too_few_accelerators_are_refused_with_the_number_needed():
    with pytest.raises(ConfigError, match="at least one replica of 4"):
        training().step_s(1, 2, [100])
    with pytest.raises(ConfigError, match="0 replicas"):
        training().step_s(0, 8, [100])


# ---- shapes


@pytest.mark.parametrize("name", [*MODELS, "demo"])
def test_declared_parameters_are_those_of_the_shape(name):
    model = profiles.model(name)
    attention = 2 * model.layers * model.hidden * (model.heads + model.kv_heads) * model.head_dim
    mlp = 3 * model.layers * model.hidden * model.intermediate
    embeddings = model.embedding_parameters * (1 if model.tied_embeddings else 2)
    experts = max(1, model.experts)
    router = model.layers * model.hidden * model.experts
    assert model.parameters == pytest.approx(attention + router + mlp * experts + embeddings, rel=0.002)
    active = attention + router + mlp * max(1, model.experts_per_token) + embeddings
    assert model.active_parameters == pytest.approx(active, rel=0.005)
    assert model.dense_parameters == pytest.approx(attention + router + (0 if model.experts else mlp), rel=0.005)


@pytest.mark.parametrize(
    ("name", "kv_bytes"),
    [("qwen3-4b", 147_456), ("qwen3-8b", 147_456), ("qwen3-14b", 163_840), ("qwen3-32b", 262_144), ("qwen3-30b-a3b", 98_304)],
)  # fmt: skip
def test_kv_bytes_per_token_are_the_published_ones(name, kv_bytes):
    assert profiles.model(name).kv_bytes_per_token() == kv_bytes

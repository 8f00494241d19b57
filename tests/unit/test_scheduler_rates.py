"""The file of rates: what is refused, in which words, and that what is written is what is read."""

import dataclasses
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.errors import ConfigError
from services.scheduler import rates
from services.scheduler.config import SchedulerConfig
from services.scheduler.core.rates import EngineKind, EngineRates, TrainerKind, TrainerRates
from services.scheduler.rates import RateTable

GOOD = """\
profile: by hand
engines:
- {type: a, tp: 1, step_s: 0.02, sequence_s: 0.0001, context_s: 1.0e-07, kv_tokens: 200000}
- type: a
  tp: 4
  step_s: 0.01
  sequence_s: 0.0
  context_s: 0.0
  kv_tokens: 900000
trainers:
- {type: a, accelerators: 4, token_s: 0.0003}
"""
FINITE = st.floats(0.0, 1e4)
ENGINES = st.builds(
    EngineRates,
    step_s=st.floats(1e-9, 1e3), sequence_s=FINITE, context_s=FINITE, kv_tokens=st.floats(1.0, 1e12),
    prefill_s=FINITE, max_running=st.integers(1, 4_096), start_s=FINITE, pause_s=FINITE, asleep_bytes=st.floats(0, 1e15),
)  # fmt: skip
TRAINERS = st.builds(
    TrainerRates,
    token_s=st.floats(1e-9, 1e3), square_s=FINITE, gather_s=FINITE, fixed_s=FINITE, reduce_s=FINITE,
    micro_batch_tokens=st.one_of(st.just(math.inf), st.floats(1.0, 1e12)), start_s=FINITE,
    asleep_bytes=st.floats(0, 1e15),
)  # fmt: skip
TYPES = st.sampled_from(["a", "h100-80gb", "1", "no", "µ: [x]", "${x}"])
TABLES = st.builds(
    RateTable,
    st.text("abc -:#${}", max_size=20),
    st.dictionaries(st.builds(EngineKind, TYPES, st.integers(1, 64)), ENGINES, min_size=1, max_size=4),
    st.dictionaries(st.builds(TrainerKind, TYPES, st.integers(1, 64)), TRAINERS, min_size=1, max_size=4),
)


@given(TABLES)
def test_what_is_written_is_what_is_read(table):
    assert rates.loads(rates.dumps(table), "x.yaml") == table


def test_defaults_are_those_of_the_rates():
    table = rates.loads(GOOD, "x.yaml")
    assert table.engines[EngineKind("a", 1)] == EngineRates(0.02, 0.0001, 1e-7, 200_000.0)
    assert table.trainers == {TrainerKind("a", 4): TrainerRates(0.0003)}
    for row, fields in ((rates.EngineRow, EngineRates), (rates.TrainerRow, TrainerRates)):
        assert set(row.model_fields) - {"type", "tp", "accelerators"} == {f.name for f in dataclasses.fields(fields)}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("kv_tokens: 900000", "kv_token: 900000", r"f.yaml:9: unknown key 'engines.1.kv_token'; did you mean 'kv_tokens'"),
        ("  tp: 4\n", "", r"f.yaml:4: 'engines.1.tp' is missing"),
        ("tp: 4", "tp: 0", r"f.yaml:5: 'engines.1.tp': .*greater than or equal to 1 \(found 0\)"),
        ("step_s: 0.01", "step_s: .nan", r"f.yaml:6: 'engines.1.step_s': .*\(found nan\)"),
        ("step_s: 0.01", "step_s: 0.0", r"f.yaml:6: 'engines.1.step_s': .*greater than 0"),
        ("step_s: 0.01", "step_s: fast", r"f.yaml:6: 'engines.1.step_s': .*valid number"),
        ("tp: 4", "tp: 1", r"f.yaml:2: 'engines': type a with tp 1 is there twice; expected one row for each kind"),
        ("profile: by hand", "profil: by hand", r"f.yaml:1: unknown key 'profil'; did you mean 'profile'"),
        ("trainers:\n- {type: a, accelerators: 4, token_s: 0.0003}", "trainers: []", r"f.yaml:10: 'trainers': .*at least 1 item"),
        ("token_s: 0.0003", "token_s: -1.0", r"f.yaml:11: 'trainers.0.token_s'"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_its_line(old, new, message):
    assert GOOD.count(old) == 1
    with pytest.raises(ConfigError, match=message):
        rates.loads(GOOD.replace(old, new), "f.yaml")


def test_a_file_that_is_not_there_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"none.yaml: cannot read the configuration file: No such file"):
        rates.read(tmp_path / "none.yaml")


def test_the_file_is_found_beside_the_configuration(tmp_path: Path):
    plain = SchedulerConfig()
    assert rates.beside(plain, tmp_path / "s.yaml") is plain
    given_ = SchedulerConfig.model_validate({"planner": {"rates": "sub/rates.yaml", "interval_s": 7.0}})
    found = rates.beside(given_, tmp_path / "s.yaml").planner
    assert (found.rates, found.interval_s) == (str(tmp_path / "sub" / "rates.yaml"), 7.0)
    absolute = SchedulerConfig.model_validate({"planner": {"rates": "/r.yaml"}})
    assert rates.beside(absolute, tmp_path / "s.yaml").planner.rates == "/r.yaml"


def test_levels_follow_the_degrees_and_the_smallest_replicas_are_known():
    table = rates.loads(GOOD.replace("type: a\n", "type: b\n"), "x.yaml")
    assert [table.level(tp) for tp in (1, 4)] == [0, 1]
    assert [table.least("ROLLOUT", t) for t in "abc"] == [1, 4, None]
    assert [table.least("TRAINER", t) for t in "ab"] == [4, None]
    assert table.has("TRAINER", "a", 4)
    assert not table.has("TRAINER", "a", 2)
    assert table.has("ROLLOUT", "b", 4)
    assert not table.has("ROLLOUT", "a", 4)
    assert (table.max_running("a", 1), table.max_running("a", 2)) == (256, None)


def test_a_file_is_not_overwritten_and_a_table_that_could_not_be_read_is_not_written(tmp_path: Path):
    table = rates.loads(GOOD, "x.yaml")
    rates.write(tmp_path / "r.yaml", table)
    assert rates.read(tmp_path / "r.yaml") == table
    with pytest.raises(ConfigError, match="exists already"):
        rates.write(tmp_path / "r.yaml", table)
    with pytest.raises(ConfigError, match="cannot write the file"):
        rates.write(tmp_path / "none" / "r.yaml", table)
    with pytest.raises(ConfigError, match="'engines'"):
        rates.write(tmp_path / "empty.yaml", RateTable("", {}, table.trainers))
    assert not (tmp_path / "empty.yaml").exists()


def test_a_key_that_is_there_twice_is_refused_rather_than_dropped():
    with pytest.raises(ConfigError, match=r"x.yaml:10: the key 'engines' is in line 2 already"):
        rates.loads(GOOD.replace("trainers:", "engines:"), "x.yaml")
    with pytest.raises(ConfigError, match=r"x.yaml:3: the key 'tp' is in line 3 already"):
        rates.loads(GOOD.replace("tp: 1,", "tp: 1, tp: 2,"), "x.yaml")


def test_a_row_may_refer_to_another():
    text = GOOD.replace("- {type: a, tp: 1", "- &a {type: a, tp: 1").replace(
        "trainers:", "- {<<: *a, tp: 2}\ntrainers:"
    )
    table = rates.loads(text, "x.yaml")
    assert table.engines[EngineKind("a", 2)] == table.engines[EngineKind("a", 1)]


def test_lists_of_aliases_that_stand_for_more_than_memory_are_refused_in_a_few_words():
    depth = 40
    lines = ["engines: &a0 [x, x]", *(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, depth))]
    with pytest.raises(ConfigError) as caught:
        rates.loads("\n".join([*lines, f"trainers: *a{depth - 1}"]), "x.yaml")
    assert len(str(caught.value)) < 200 * depth


def test_a_file_name_that_no_system_has_is_refused_in_words():
    with pytest.raises(ConfigError, match="cannot read the configuration file: embedded null"):
        rates.read("a\0b")

"""Bad input to the simulator's commands: one message that says what and where, exit code 2, nothing simulated."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
import yaml

from services.ops.__main__ import main
from services.simulator import experiment, hardware, presets, profiles
from services.simulator.hardware import DecodeConstants, PrefillConstants
from services.simulator.layout import Layout
from services.simulator.profiles import FOLDER

HEADER = json.dumps({"schema": "agentic-traj/1"})
TURN = {"gen": 5, "tool": "bash", "out": "ok", "lat_s": 1.5, "obs": 3}
GOOD = {"id": "a", "group": "g", "prompt": 10, "turns": [TURN, {**TURN, "tool": None, "lat_s": None}]}
NESTED = "[" * 100_000
DIGITS = "9" * 5_000


@pytest.fixture
def refused(capsys, monkeypatch):
    """Runs a command that must be refused before anything is simulated; its one message."""

    def never(*_, **__):
        raise AssertionError("simulated in spite of bad input")

    monkeypatch.setattr(experiment, "runner", never)
    monkeypatch.setenv("COLUMNS", "300")  # usage errors in one line

    def run(*arguments: str) -> str:
        assert main(list(arguments)) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert len(err) < 1_000
        return err

    return run


def trace(folder: Path, *lines: str) -> str:
    path = folder / "episodes.jsonl"
    path.write_text("\n".join((HEADER, *lines)))
    return str(path)


def good(**changes) -> str:
    return json.dumps({**GOOD, **changes})


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--latency", "inf", "scale of generated 1.0, of latency inf: expected finite"),
        ("--latency", "nan", "of latency nan: expected finite"),
        ("--latency", "1e9", "episode 'a' comes to 1.5e+09 s; at most 86,400"),
        ("--scale", "inf", "scale of generated inf, of latency"),
        ("--scale", "nan", "scale of generated nan, of latency"),
        ("--scale", "1e300", "episode 'a' comes to 5e+300 tokens; at most"),
        ("--seed", "-1", "Invalid value for '--seed'"),
    ],
)
def test_factors_and_seeds_of_a_replay_that_mean_nothing_are_refused(refused, tmp_path, option, value, said):
    assert said in refused("replay", trace(tmp_path, good()), option, value)


def test_all_factors_are_looked_at_before_the_first_is_simulated(refused, tmp_path):
    factors = ["--latency", "1", "--latency", "inf"]
    assert "of latency inf" in refused("replay", trace(tmp_path, good()), *factors, "--workers", "1")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (good(turns=[{**TURN, "lat_s": 1e308}]), ":2: turns[0]: lat_s is 1e+308, expected seconds >= 0 or null"),
        (good(turns=[{**TURN, "lat_s": 90_000}]), ":2: turns[0]: lat_s is 90000, expected seconds >= 0 or null"),
        (good(prompt=10**400), ":2: prompt is 1000"),
        (NESTED, ":2: cannot be read: maximum recursion depth exceeded"),
        (good().replace("1.5", DIGITS), ":2: cannot be read: Exceeds the limit"),
        (good(turns=[{**TURN, "tool": ["x" * 5_000]}]), ":2: turns[0]: tool is ['xxx"),
        (good().replace('"bash"', "[" * 500 + "]" * 500), ":2: turns[0]: tool is [[[[[["),
    ],
)
def test_lines_of_a_trace_beyond_all_bounds_are_named(refused, tmp_path, line, said):
    path = trace(tmp_path, line)
    assert path + said in refused("replay", path)


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ("24 training, 9999999999xTP1", "'9999999999' is too large; expected at most 100,000"),
        ("24 training, 90000xTP1 + 90000xTP2", "expected engines of at most 100,000"),
        ("24 training, 100000xTP0 + 1xTP1", "expected engines of at most 100,000"),
        (f"24 training, 1xTP{DIGITS}", "is too large"),
        (f"{DIGITS} training, 1xTP1", "is too large"),
        ("x" * 5_000, "expected such as"),
    ],
)
def test_a_layout_beyond_all_bounds_is_refused_before_it_is_listed(refused, layout, said):
    assert said in refused("simulate", "--preset", "r2e-48", "--layout", layout)


# ---- tables and reports

REPORT = {"tp": 1, "sequences": 4, "context_tokens": 800, "seconds_per_step": 0.02}
STEP = {
    "model": "Qwen3-4B",
    "tp": 1,
    "phase": "decode",
    "batch": 1,
    "ctx_tokens": 64,
    "latency_ms": 7,
    "fits_memory": 1,
}


def report(**changes) -> str:
    return json.dumps({**REPORT, **changes})


def table(**changes) -> str:
    return ",".join(STEP) + "\n" + ",".join(str(value) for value in {**STEP, **changes}.values())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (report(tp=1.5), ":1: tp is 1.5; expected a whole number"),
        (report(tp=1e200), ":1: tp is 1e+200; expected at least 1 and at most 1024"),
        (report(sequences=1e200), ":1: sequences is 1e+200; expected"),
        (report(context_tokens=1e200), ":1: context_tokens is 1e+200; expected"),
        (report(seconds_per_step=1e-300), ":1: seconds_per_step is 1e-300; expected"),
        (report(seconds_per_step=float("inf")), ":1: seconds_per_step is inf; expected"),
        (report(tp=10**400), ":1: int too large to convert to float; expected a JSON object"),
        (report().replace("800", DIGITS), ":1: Exceeds the limit"),
        (NESTED, ":1: maximum recursion depth exceeded"),
    ],
)
def test_reports_beyond_all_bounds_are_refused_with_their_line(refused, tmp_path, text, said):
    path = tmp_path / "reports.jsonl"
    path.write_text(text)
    arguments = ("--hardware", "a100-80gb", "--model", "Qwen3-4B")
    assert f"{path}{said}" in refused("calibrate", "--reports", str(path), *arguments)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (table(tp=10**400), ":2: tp is 1000"),
        (table(batch=10**400), ":2: batch is 1000"),
        (table(ctx_tokens=10**400), ":2: ctx_tokens is 1000"),
        (table(latency_ms=1e-300), ":2: latency_ms is 1e-300; expected"),
        (table(phase="x" * 5_000), ":2: phase 'xxx"),
        (table(model="x" * 200_000), ":2: not CSV: field larger than field limit"),
        (table().removesuffix(",1"), ":2: no value of fits_memory"),
    ],
)
def test_rows_of_a_table_beyond_all_bounds_are_refused_with_their_line(refused, tmp_path, text, said):
    path = tmp_path / "table.csv"
    path.write_text(text)
    assert f"{path}{said}" in refused("calibrate", "--table", str(path), "--hardware", "a100-80gb")


@pytest.mark.parametrize(
    "arguments",
    [
        ("calibrate", "--hardware", "a100-80gb", "--table", "{file}"),
        ("calibrate", "--hardware", "a100-80gb", "--model", "Qwen3-4B", "--reports", "{file}"),
        ("calibrate", "--hardware", "{file}", "--table", "{file}"),
        ("simulate", "--preset", "r2e-48", "--profile", "{file}"),
        ("simulate", "--preset", "r2e-48", "--model", "{file}"),
        ("replay", "{trace}", "--profile", "{file}"),
        ("replay", "{file}"),
    ],
)
def test_files_that_are_not_utf8_are_named(refused, tmp_path, arguments):
    path = tmp_path / "latin.yaml"
    path.write_bytes("model: café".encode("latin-1"))
    named = {"{file}": str(path), "{trace}": trace(tmp_path, good())}
    message = refused(*(named.get(a, a) for a in arguments))
    assert str(path) in message
    assert "not UTF-8 at byte 10" in message


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model: " + "[" * 1_000, "cannot be read as YAML: maximum recursion depth exceeded"),
        (f"model: {{layers: {DIGITS}}}", "cannot be read as YAML: Exceeds the limit"),
        ("sources: [2026-13-45]", "cannot be read as YAML: month must be in 1..12"),
    ],
)
def test_yaml_that_cannot_be_read_is_named(refused, tmp_path, text, said):
    path = tmp_path / "deep.yaml"
    path.write_text(text)
    for option in ("--model", "--profile"):
        assert f"{path}: {said}" in refused("simulate", "--preset", "r2e-48", option, str(path))


# ---- profiles

FILES = {
    "hardware": FOLDER / "hardware" / "a100-80gb.yaml",
    "model": FOLDER / "models" / "qwen3-30b-a3b.yaml",
    "operations": FOLDER / "operations.yaml",
}
DIVIDING = [
    ("hardware", f"accelerator.{name}")
    for name in ("hbm_bytes", "hbm_bytes_s", "flops", "nvlink_bytes_s", "pcie_bytes_s")
]
DIVIDING += [("hardware", f"node.{name}") for name in ("accelerators", "network_bytes_s")]
DIVIDING += [("model", f"model.{name}") for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "vocabulary")]
DIVIDING += [("model", f"model.{name}") for name in ("intermediate", "parameters", "active_parameters")]
DIVIDING += [("operations", f"weight_sync.{name}") for name in ("gather_bytes_s", "broadcast_bytes_s")]
DIVIDING += [("operations", f"host_copy.{name}") for name in ("pcie_efficiency", "host_bytes_s")]
DIVIDING += [("operations", name) for name in ("memory.fraction", "memory.batched_tokens", "cold_start.load_bytes_s")]
DIVIDING += [("operations", f"training.{name}") for name in ("mfu_dense", "mfu_moe", "micro_batch_tokens")]
DIVIDING += [("operations", name) for name in ("kv_move.link_efficiency", "training.link_efficiency")]


def changed(folder: Path, kind: str, place: str, value: object) -> tuple[str, ...]:
    """A command that reads the package's file of this kind, with one value changed."""
    content = yaml.safe_load(FILES[kind].read_text())
    section, name = place.split(".")
    content[section][name] = value
    (folder / f"{kind}.yaml").write_text(yaml.safe_dump(content))
    return ("simulate", "--preset", "r2e-48", *using(folder, kind))


def using(folder: Path, kind: str) -> tuple[str, str]:
    if kind == "operations":
        (folder / "profile.yaml").write_text("hardware: a100-80gb\noperations: operations.yaml\n")
    options = {"hardware": ("--profile", "hardware"), "model": ("--model", "model")}
    option, stem = options.get(kind, ("--profile", "profile"))
    return option, str(folder / f"{stem}.yaml")


@pytest.mark.parametrize(("kind", "place"), DIVIDING)
@pytest.mark.parametrize(("value", "said"), [(0, "greater than"), (10**30, "less than")])
def test_figures_of_a_profile_that_nothing_can_be_divided_by_are_refused(refused, tmp_path, kind, place, value, said):
    message = refused(*changed(tmp_path, kind, place, value))
    assert f"{kind}.yaml:" in message
    assert f"'{place}': Input should be {said}" in message


def test_every_number_of_a_profile_has_bounds_or_may_be_zero():
    may_be_zero = {"experts", "experts_per_token", "reserved_bytes", "state_bytes_per_parameter", "gradient_bytes"}
    none = {"collective_bytes_s", "memory_fraction"}  # of Extra, where 0 stands for it
    factors = {f.name for kind in (DecodeConstants, PrefillConstants) for f in dataclasses.fields(kind)}
    named = profiles.AT_LEAST_ONE | profiles.RATES | profiles.SHARES | profiles.TIMES
    numbers = {
        f.name
        for kind in vars(hardware).values()
        if dataclasses.is_dataclass(kind)
        for f in dataclasses.fields(kind)
        if f.type in (int, float)
    }
    assert numbers == named | may_be_zero | none | factors
    assert not (named - profiles.TIMES) & (may_be_zero | none | factors)


@pytest.mark.parametrize(
    ("kind", "place", "value", "said"),
    [
        ("model", "model.experts_per_token", 129, "experts_per_token is 129 of 128 experts; expected 1 to 128"),
        ("model", "model.experts_per_token", 0, "experts_per_token is 0 of 128 experts; expected 1 to 128"),
        ("model", "model.parameters", 1e9, "parameters is 1e+09; expected at least the 2.9"),
        ("model", "model.active_parameters", 1e12, "and the 1e+12 of active_parameters"),
        ("operations", "training.pipeline_stages", 0, "'training.pipeline_stages': Input should be greater than"),
        ("operations", "kv_move.latency_s", 1e6, "'kv_move.latency_s': Input should be less than or equal to 86400"),
    ],
)
def test_figures_that_contradict_each_other_or_are_beyond_all_bounds_are_refused(
    refused, tmp_path, kind, place, value, said
):
    assert said in refused(*changed(tmp_path, kind, place, value))


def test_a_machine_whose_episodes_would_not_end_is_refused(tmp_path, capsys):
    arguments = changed(tmp_path, "hardware", "accelerator.hbm_bytes_s", 1e6)
    assert main([*arguments, "--policies", "libra", "--workers", "1"]) == 2
    message = capsys.readouterr().err
    assert re.search(r"a step of one token of Qwen3-14B takes \d\.\d+e\+04 s on 1 x A100-SXM-80GB", message)
    assert "expected above 0 and at most 100: correct the rates" in message


@pytest.mark.parametrize("share", [5.0, -0.1, float("nan")])
def test_an_engine_has_no_more_memory_than_its_device(refused, tmp_path, share):
    path = tmp_path / "mine.yaml"
    path.write_text(f"hardware: a100-80gb\nextra:\n  memory_fraction: {yaml.safe_dump(share)}")
    message = refused("simulate", "--preset", "r2e-48", "--profile", str(path))
    assert f"{path}:3: 'extra.memory_fraction': Input should be" in message


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"event": "schedule", "trajectory": "a", "tokens": 10**400}, ":1: tokens is 1000"),
        ({"event": "x" * 5_000, "trajectory": "a"}, ":1: event is 'xxx"),
        ({"event": "schedule", "trajectory": "a", "x" * 5_000: 1}, ":1: unknown key 'xxx"),
    ],
)
def test_a_routers_event_is_refused_in_a_short_message_however_long_it_is(refused, tmp_path, line, said):
    path = tmp_path / "events.jsonl"
    path.write_text(json.dumps(line))
    assert f"{path}{said}" in refused("bench", "decisions", "--events", str(path))


# ---- presets and policies

OPTIONS = {
    "profile": "nonsense",
    "model": "nonsense",
    "policies": "nonsense",
    "seeds": "2",
    "steps": "3",
    "workers": "1",
    "layout": "24 training, 24xTP1",
    "trace": "nonsense",
}
TAKEN = {
    "anchors": "",
    "r2e-48": "profile model policies seeds steps workers layout",
    "shift-48": "profile model policies seeds steps workers",
    "failures-4": "profile model policies seeds workers",
    "outcomes": "profile model seeds steps workers trace",
    "kv-48": "profile model seeds steps workers",
    "ablation": "profile model seeds steps workers layout",
}


@pytest.mark.parametrize(
    ("preset", "option"),
    [(preset, option) for preset, taken in TAKEN.items() for option in OPTIONS if option not in taken.split()],
)
def test_an_option_that_a_preset_has_no_use_for_is_refused(refused, preset, option):
    message = refused("simulate", "--preset", preset, f"--{option}", OPTIONS[option])
    assert f"--preset {preset} takes no --{option}; leave it out, it takes" in message
    assert all(f"--{taken}" in message for taken in TAKEN[preset].split())


@pytest.mark.parametrize(("preset", "taken"), TAKEN.items())
def test_the_options_that_a_preset_takes_reach_it_and_the_others_are_the_defaults(capsys, monkeypatch, preset, taken):
    asked = []

    def noted(given: presets.Asked) -> presets.Shown:
        asked.append(given)
        return presets.Shown({}, (), ())

    monkeypatch.setitem(presets.PRESETS, preset, dataclasses.replace(presets.PRESETS[preset], run=noted))
    options = [part for option in taken.split() for part in (f"--{option}", OPTIONS[option])]
    assert main(["simulate", "--preset", preset, *options]) == 0
    values = {**OPTIONS, "seeds": 2, "steps": 3, "workers": 1, "layout": Layout((1,) * 24, 24)}
    values["trace"] = (Path("nonsense"),)
    assert asked == [presets.Asked(**{option: values[option] for option in taken.split()})]


@pytest.mark.parametrize("policies", ["colocated", "tail-batching,colocated"])
def test_policies_that_a_run_without_training_leaves_out_are_refused_if_none_remains(refused, tmp_path, policies):
    for command in (("replay", trace(tmp_path, good())), ("simulate", "--preset", "failures-4")):
        message = refused(*command, "--policies", policies)
        assert f"--policies '{policies}': nothing is trained here" in message
        assert "expected all or at least one of libra, best-static" in message


def test_policies_that_are_left_out_are_said_below_the_tables(tmp_path, capsys):
    arguments = ["--policies", "static-uniform,colocated", "--samples", "1", "--workers", "1", "--latency", "1"]
    assert main(["replay", trace(tmp_path, good()), *arguments, "--scale", "1"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("note: colocated: nothing is trained here, so synchronous policies are left out") == 1
    assert shown.count("static-uniform") == 2  # on each of two profiles


def test_the_failures_preset_says_which_policies_it_leaves_out(monkeypatch):
    monkeypatch.setattr(experiment, "failures_4", lambda *_, **__: {"policies": []})
    shown = presets.run("failures-4", {})
    assert shown.notes == ("colocated, tail-batching: nothing is trained here, so synchronous policies are left out",)
    assert shown.document["notes"] == list(shown.notes)
    assert presets.run("failures-4", {"policies": "libra"}).notes == ()

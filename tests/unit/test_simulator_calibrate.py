"""The fit: known constants come back, held rows stay out of it, the shipped constants are those of the tables."""

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.errors import ConfigError
from services.ops.__main__ import main
from services.simulator import anchors, calibrate, profiles
from services.simulator.calibrate import COLUMNS, StepRow, fit_reports, fit_table, is_held, predicted_s, read_table
from services.simulator.steptimes import ModelledEngine
from tests.support.shared import calibration

TABLES = {
    "a100-80gb": "aic_a100_sxm_vllm.csv",
    "h100-80gb": "aic_h100_sxm_vllm.csv",
    "h200-141gb": "aic_h200_sxm_vllm.csv",
}
MODELS = {name: profiles.model(name) for name in ("Qwen3-4B", "Qwen3-8B", "Qwen3-14B", "Qwen3-32B", "Qwen3-30B-A3B")}
A100 = profiles.hardware_file("a100-80gb")
FACTORS = st.floats(1.05, 3.0)


def grid(constants, accelerator=A100.accelerator):
    """A table as it would be if the constants were true."""
    rows = []
    for model, shape in MODELS.items():
        for tp in (1, 2, 4, 8):
            decode = [("decode", b, c) for b in (1, 4, 16, 64, 256) for c in (2_048, 16_384)]
            for phase, batch, context in [*decode, *(("prefill", 1, n) for n in (256, 1_024, 8_192, 32_768))]:
                row = StepRow(model, tp, phase, batch, context, 1.0)
                rows.append(dataclasses.replace(row, seconds=predicted_s(row, constants, accelerator, shape)))
    return rows


def scaled(factor):
    decode, prefill = A100.constants.decode, A100.constants.prefill
    return dataclasses.replace(
        A100.constants,
        decode=type(decode)(**{k: v * factor for k, v in dataclasses.asdict(decode).items()}),
        prefill=type(prefill)(**{k: v * factor for k, v in dataclasses.asdict(prefill).items()}),
    )


@given(FACTORS)
def test_the_fit_gives_back_the_constants_that_a_table_was_made_from(factor):
    known = scaled(factor)
    found = fit_table(grid(known), A100.accelerator, MODELS).constants
    for one, other in ((found.decode, known.decode), (found.prefill, known.prefill)):
        assert dataclasses.asdict(one) == pytest.approx(dataclasses.asdict(other), rel=2e-3)


def test_nothing_is_fitted_below_its_datasheet():
    found = fit_table(grid(scaled(0.5)), A100.accelerator, MODELS).constants
    values = dataclasses.asdict(found.decode) | dataclasses.asdict(found.prefill)
    assert all(values[name] >= 1 for name in calibrate.OVER_DATASHEET)


def test_held_combinations_are_whole_and_cover_every_model_and_tp():
    rows = grid(A100.constants)
    held = is_held(rows)
    combinations = {(r.model, r.tp) for r in rows if held(r)}
    assert len(combinations) >= 6
    assert {m for m, _ in combinations} == set(MODELS)
    assert {tp for _, tp in combinations} == {1, 2, 4, 8}
    assert not combinations & {(r.model, r.tp) for r in rows if not held(r)}


def test_the_three_folds_hold_every_combination_once():
    rows = grid(A100.constants)
    folds = [is_held(rows, fold) for fold in range(3)]
    assert all(sum(held(row) for held in folds) == 1 for row in rows)


def test_held_rows_have_no_part_in_the_fit():
    rows = grid(A100.constants)
    held = is_held(rows)
    spoilt = [dataclasses.replace(r, seconds=r.seconds * 10) if held(r) else r for r in rows]
    whole, other = (fit_table(r, A100.accelerator, MODELS) for r in (rows, spoilt))
    assert whole.constants == other.constants
    assert other.median_error(held=True) == pytest.approx(0.9, abs=0.01)
    assert whole.median_error(held=True) < 0.001


def test_a_table_that_is_too_small_is_refused():
    with pytest.raises(ConfigError, match=r"0 rows for 9 constants.*too few"):
        fit_table([r for r in grid(A100.constants) if r.phase == "decode"], A100.accelerator, MODELS)


# ---- the tables themselves


@pytest.mark.parametrize("name", TABLES)
def test_the_shipped_constants_are_the_fit_of_the_table(name):
    rows = read_table(calibration(TABLES[name]))
    machine = profiles.hardware_file(name)
    fit = fit_table(rows, machine.accelerator, calibrate.shapes(rows))
    for one, other in (
        (fit.constants.decode, machine.constants.decode),
        (fit.constants.prefill, machine.constants.prefill),
    ):
        assert dataclasses.asdict(one) == pytest.approx(dataclasses.asdict(other), rel=2e-3)


@pytest.mark.parametrize("name", TABLES)
def test_the_shipped_held_rows_are_those_of_the_table(name):
    rows = read_table(calibration(TABLES[name]))
    held = is_held(rows)
    shipped = next(t for t in anchors.data().step_times if t.hardware == name).parsed()
    assert shipped == [dataclasses.replace(r, seconds=pytest.approx(r.seconds)) for r in rows if held(r)]


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("fold", [0, 1, 2])
def test_whichever_third_is_held_its_median_error_stays_within_a_tenth(name, fold):
    rows = read_table(calibration(TABLES[name]))
    fit = fit_table(rows, profiles.hardware_file(name).accelerator, calibrate.shapes(rows), fold)
    for phase in ("decode", "prefill"):
        assert fit.median_error(held=True, phase=phase) <= 0.10


@pytest.mark.parametrize("name", TABLES)
def test_what_fits_the_memory_agrees_with_the_table(name):
    text = calibration(TABLES[name]).read_text().splitlines()
    hardware = profiles.profile(name).hardware
    engines = {model: ModelledEngine(hardware, shape) for model, shape in MODELS.items()}
    agree = []
    for line in text[1:]:
        _, _, _, model, tp, phase, batch, context, _, _, fits = line.split(",")
        if phase == "decode":
            agree.append(engines[model].fits(int(tp), int(batch) * int(context)) == (fits == "1"))
    assert sum(agree) / len(agree) >= 0.97


# ---- files


def table(folder, rows, columns=COLUMNS):
    path = folder / "table.csv"
    lines = [",".join(columns)]
    lines += [f"{r.model},{r.tp},{r.phase},{r.batch},{r.context},{r.seconds * 1e3},1" for r in rows]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_table_is_read_as_it_was_written(tmp_path):
    rows = grid(A100.constants)
    assert read_table(table(tmp_path, rows)) == [dataclasses.replace(r, seconds=pytest.approx(r.seconds)) for r in rows]


def test_rows_that_do_not_fit_the_memory_are_left_out(tmp_path):
    path = table(tmp_path, grid(A100.constants)[:3])
    path.write_text(path.read_text() + "Qwen3-32B,1,decode,256,32768,1.0,0\n")
    assert len(read_table(path)) == 3


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("Qwen3-4B,one,decode,1,2048,7.0,1", r"table\.csv:2: .*expected numbers"),
        ("Qwen3-4B,1,train,1,2048,7.0,1", r"table\.csv:2: phase 'train'; expected decode or prefill"),
        ("Qwen3-4B,1,decode,1,2048,0,1", r"table\.csv:2: latency_ms is 0\.0; expected at least"),
        ("Qwen3-4B,1,decode,1,2048,nan,1", r"table\.csv:2: latency_ms is nan; expected at least"),
        ("Qwen3-4B,1,decode,1", r"table\.csv:2: no value of ctx_tokens, latency_ms, fits_memory"),
        ("", "nothing to fit"),
    ],
)
def test_a_wrong_line_of_a_table_is_refused_with_its_number(tmp_path, line, said):
    path = tmp_path / "table.csv"
    path.write_text(",".join(COLUMNS) + "\n" + line + "\n")
    with pytest.raises(ConfigError, match=said):
        read_table(path)


def test_a_table_without_a_column_or_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no column fits_memory"):
        read_table(table(tmp_path, [], COLUMNS[:-1]))
    with pytest.raises(ConfigError, match="cannot read"):
        read_table(tmp_path / "nowhere.csv")


def test_models_that_the_package_does_not_know_are_named(tmp_path):
    rows = [dataclasses.replace(r, model="Llama-9") for r in grid(A100.constants)[:1]]
    with pytest.raises(ConfigError, match="called Llama-9; name their files by --model"):
        calibrate.shapes(rows)


# ---- a worker's reports


def reports(folder, engine, tps=(2,), noise=0.0):
    path = folder / "reports.jsonl"
    lines = []
    for index, (tp, count, each) in enumerate(
        (t, n, c) for t in tps for n in (1, 4, 16, 64) for c in (500, 4_000, 16_000)
    ):
        seconds = engine.decode_s(tp, count, count * each) * (1 + noise * (-1) ** index)
        lines.append(
            json.dumps({"tp": tp, "sequences": count, "context_tokens": count * each, "seconds_per_step": seconds})
        )
    path.write_text("\n".join(lines) + "\n")
    return path


@given(st.floats(1.0, 4.0), st.floats(1.0, 4.0), st.sampled_from(["Qwen3-14B", "Qwen3-30B-A3B"]))
def test_reports_of_a_slower_worker_make_the_model_as_slow(tmp_path_factory, slower, starved, name):
    decode = A100.constants.decode
    changed = dataclasses.replace(decode, layer_s=decode.layer_s * slower, kv_read=decode.kv_read * starved)
    truth = dataclasses.replace(A100, constants=dataclasses.replace(A100.constants, decode=changed))
    engine = ModelledEngine(profiles.assemble(truth, profiles.operations_file(), profiles.Extra()), MODELS[name])
    path = reports(tmp_path_factory.mktemp("reports"), engine)
    fitted, error = fit_reports(path, A100, MODELS[name])
    assert error < 0.01
    again = ModelledEngine(profiles.assemble(fitted, profiles.operations_file(), profiles.Extra()), MODELS[name])
    assert again.decode_s(2, 32, 32 * 8_000) == pytest.approx(engine.decode_s(2, 32, 32 * 8_000), rel=0.03)


def test_reports_that_say_nothing_new_leave_the_constants_and_what_they_do_not_show(tmp_path):
    engine = ModelledEngine(profiles.profile("a100-80gb").hardware, MODELS["Qwen3-14B"])
    fitted, error = fit_reports(reports(tmp_path, engine, noise=0.02), A100, MODELS["Qwen3-14B"])
    assert error < 0.03
    assert fitted.constants.prefill == A100.constants.prefill
    assert fitted.constants.decode.expert_read == A100.constants.decode.expert_read  # a dense model shows no experts
    assert fitted.constants.decode.kv_read == pytest.approx(A100.constants.decode.kv_read, rel=0.05)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("not json", r"reports\.jsonl:1: .*expected a JSON object"),
        ('{"tp": 1}', r"reports\.jsonl:1: .*'sequences'.*expected a JSON object"),
        ('{"tp": 0, "sequences": 1, "context_tokens": 1, "seconds_per_step": 1}', "tp is 0.0; expected at least 1 and"),
        (
            '{"tp": 1, "sequences": 1, "context_tokens": 1, "seconds_per_step": 0}',
            "seconds_per_step is 0.0; expected at least",
        ),
        ('{"tp": 1, "sequences": 1, "context_tokens": NaN, "seconds_per_step": 1}', "context_tokens is nan; expected"),
        ("", "no reports"),
    ],
)
def test_wrong_reports_are_refused_with_their_line(tmp_path, line, said):
    path = tmp_path / "reports.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ConfigError, match=said):
        fit_reports(path, A100, MODELS["Qwen3-14B"])


# ---- the command


def test_the_command_writes_a_profile_that_is_read_back(tmp_path, capsys):
    out = tmp_path / "mine.yaml"
    given_table = table(tmp_path, grid(scaled(1.5)))
    assert main(["calibrate", "--table", str(given_table), "--hardware", "a100-80gb", "--out", str(out), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["median_error"]["held decode"] < 0.001
    found = profiles.profile(str(out)).hardware
    assert dataclasses.asdict(found.decode) == pytest.approx(shown["decode"])
    assert found.decode.kv_read == pytest.approx(1.5 * A100.constants.decode.kv_read, rel=2e-3)
    assert main(["calibrate", "--table", str(given_table), "--hardware", "a100-80gb", "--out", str(out)]) == 2
    assert "exists already" in capsys.readouterr().err


def test_the_command_fits_a_workers_reports(tmp_path, capsys):
    engine = ModelledEngine(profiles.profile("a100-80gb").hardware, MODELS["Qwen3-14B"])
    path, out = reports(tmp_path, engine), tmp_path / "mine.yaml"
    arguments = ["--reports", str(path), "--hardware", "a800-80gb", "--model", "Qwen3-14B", "--out", str(out)]
    assert main(["calibrate", *arguments]) == 0
    assert "12 reports of Qwen3-14B" in capsys.readouterr().out
    assert profiles.profile(str(out)).hardware.accelerator.name == "A800-SXM-80GB"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--hardware", "a100-80gb"], "either --table FILE or --reports FILE"),
        (["--hardware", "a100-80gb", "--table", "a", "--reports", "b"], "either --table FILE or --reports FILE"),
        (["--hardware", "a100-80gb", "--reports", "b"], "expected one --model, found 0"),
        (["--hardware", "nothing", "--table", "a"], "no profile 'nothing'"),
    ],
)
def test_the_command_refuses_what_it_cannot_do(arguments, said, capsys):
    assert main(["calibrate", *arguments]) == 2
    assert said in capsys.readouterr().err

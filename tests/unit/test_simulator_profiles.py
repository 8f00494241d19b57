"""Profiles as files: the shipped ones are whole, a user's are read by path, and what is wrong is said with its line."""

import dataclasses
from pathlib import Path

import pytest
import yaml

from services.common.errors import ConfigError
from services.simulator import profiles
from services.simulator.hardware import Extra
from services.simulator.profiles import FOLDER

A100 = (FOLDER / "hardware" / "a100-80gb.yaml").read_text()
QWEN = (FOLDER / "models" / "qwen3-14b.yaml").read_text()


def written(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("name", profiles.names() + profiles.names("hardware"))
def test_every_shipped_profile_is_whole_and_names_its_sources(name):
    found = profiles.profile(name)
    assert found.name == name
    assert len(found.sources) >= 5
    for kind in (found.hardware.accelerator, found.hardware.node):
        assert all(value for value in dataclasses.asdict(kind).values()), kind


@pytest.mark.parametrize("name", profiles.names("hardware"))
def test_every_kind_of_machine_says_what_its_constants_were_fitted_to(name):
    constants = profiles.hardware_file(name).constants
    assert constants is not None
    assert len(constants.fitted_to) > 20


def test_the_wanted_machines_models_and_profiles_are_shipped():
    assert {"a100-modelled", "a800-paper"} <= set(profiles.names())
    assert {"a100-80gb", "a800-80gb", "h100-80gb", "h800-80gb", "h200-141gb", "cpu-slot"} <= set(
        profiles.names("hardware")
    )
    models = {"qwen3-4b", "qwen3-8b", "qwen3-14b", "qwen3-32b", "qwen3-30b-a3b"}
    assert models <= set(profiles.names("models"))


def test_an_a800_is_an_a100_but_for_its_name_and_nvlink():
    one, other = profiles.hardware_file("a100-80gb"), profiles.hardware_file("a800-80gb")
    assert one.constants == other.constants
    assert dataclasses.replace(other.accelerator, name=one.accelerator.name, nvlink_bytes_s=3e11) == one.accelerator
    assert other.accelerator.nvlink_bytes_s < one.accelerator.nvlink_bytes_s


def test_only_the_papers_profile_has_an_extra():
    assert profiles.profile("a100-modelled").hardware.extra == Extra()
    assert profiles.profile("a800-paper").hardware.extra != Extra()


def test_models_are_found_by_the_name_that_their_maker_writes():
    assert profiles.model("Qwen3-30B-A3B") == profiles.model("qwen3-30b-a3b")


def test_an_unknown_name_is_answered_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"no profile 'b200'; expected one of .*a800-paper.*h200-141gb"):
        profiles.profile("b200")
    with pytest.raises(ConfigError, match=r"expected one of .*qwen3-14b"):
        profiles.model("qwen4")


def test_operations_are_no_profile():
    with pytest.raises(ConfigError, match="no profile 'operations'"):
        profiles.profile("operations")


def test_a_users_own_profile_names_its_hardware_beside_it(tmp_path):
    written(tmp_path, "mine.yaml", A100.replace("A100-SXM-80GB", "MINE"))
    own = written(tmp_path, "cluster.yaml", "hardware: mine.yaml\nextra:\n  tp_step_s: 0.01\n")
    found = profiles.profile(own)
    assert found.name == "cluster"
    assert found.hardware.accelerator.name == "MINE"
    assert found.hardware.extra == Extra(tp_step_s=0.01)


def test_a_users_own_operations_take_the_place_of_ours(tmp_path):
    text = (FOLDER / "operations.yaml").read_text().replace("fraction: 0.9", "fraction: 0.5")
    written(tmp_path, "software.yaml", text)
    own = written(tmp_path, "cluster.yaml", "hardware: a100-80gb\noperations: software.yaml\n")
    assert profiles.profile(own).hardware.operations.memory.fraction == 0.5


def test_a_hardware_file_is_a_profile_without_an_extra(tmp_path):
    own = written(tmp_path, "mine.yaml", A100)
    assert profiles.profile(own).hardware == profiles.profile("a100-80gb").hardware


def test_an_unknown_key_is_refused_with_file_line_and_the_nearest_key(tmp_path):
    wrong = written(tmp_path, "mine.yaml", A100.replace("    kv_read:", "    kv_reads:"))
    line = next(n for n, text in enumerate(A100.splitlines(), 1) if "kv_read:" in text)
    with pytest.raises(ConfigError, match=rf"mine\.yaml:{line}: unknown key .*kv_reads'; did you mean 'kv_read'"):
        profiles.hardware_file(wrong)


def test_an_unknown_key_of_a_profile_is_refused_too(tmp_path):
    wrong = written(tmp_path, "mine.yaml", "hardware: a100-80gb\nextra:\n  tp_step: 0.01\n")
    with pytest.raises(ConfigError, match=r"mine\.yaml:3: unknown key .*did you mean 'tp_step_s'"):
        profiles.profile(wrong)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (A100.replace("layer_s: 2", "layer_s: -2", 1), r"layer_s.*greater than or equal to 0"),
        (A100.replace("flops: 3.12e+14", "flops: .inf"), r"flops.*finite"),
        (A100.replace("flops: 3.12e+14", "flops: fast"), r"flops.*number"),
        (A100.replace("  flops: 3.12e+14\n", ""), r"flops' is missing"),
        (A100 + "constants_of: h100-80gb\n", "either constants or constants_of"),
        (A100.split("constants:")[0], "either constants or constants_of"),
        (A100.split("constants:")[0] + "constants_of: a800-80gb\n", "no constants of its own"),
    ],
)
def test_a_wrong_hardware_file_is_refused(tmp_path, text, said):
    with pytest.raises(ConfigError, match=said):
        profiles.hardware_file(written(tmp_path, "mine.yaml", text))


def test_a_model_that_is_no_mixture_needs_no_experts(tmp_path):
    assert "experts" not in QWEN
    assert profiles.model(written(tmp_path, "mine.yaml", QWEN)).experts == 0


def test_a_file_that_is_not_there_is_said_to_be_so(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: cannot read"):
        profiles.profile(str(tmp_path / "nowhere.yaml"))


def test_every_data_file_is_plain_yaml():
    for path in [*FOLDER.rglob("*.yaml"), FOLDER.with_name("data") / "anchors.yaml"]:
        assert yaml.safe_load(path.read_text()), path

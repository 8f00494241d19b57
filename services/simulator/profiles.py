"""Profiles as files: kinds of machines, models, and named profiles; the package's own by name, a user's by path.

A file is read into the dataclasses of `hardware.py`. An unknown key is refused with file, line and the nearest key.
"""

import dataclasses
import functools
import operator
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import pydantic
import yaml

from services.common import config
from services.common.config import Strict
from services.common.errors import ConfigError
from services.simulator.hardware import (
    AcceleratorType,
    DecodeConstants,
    Extra,
    Hardware,
    ModelShape,
    NodeTopology,
    Operations,
    PrefillConstants,
)

FOLDER = Path(__file__).with_name("profiles")
"""The package's own files."""
T = TypeVar("T")

GREATEST = 1e18
"""Of any number in a file: what is computed from them stays finite."""
LONGEST_S = 86_400.0
"""Of any time in a file."""
LEAST_RATE = 1e6
"""Bytes or operations per second; slower than anything that a model is served on."""
LEAST_SHARE = 1e-3
AT_LEAST_ONE = {
    "hbm_bytes", "accelerators", "layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate",
    "vocabulary", "parameters", "active_parameters", "batched_tokens", "micro_batch_tokens", "pipeline_stages",
}  # fmt: skip
RATES = {
    "hbm_bytes_s", "flops", "nvlink_bytes_s", "pcie_bytes_s", "network_bytes_s", "gather_bytes_s", "broadcast_bytes_s",
    "host_bytes_s", "load_bytes_s",
}  # fmt: skip
SHARES = {"fraction", "pcie_efficiency", "link_efficiency", "mfu_dense", "mfu_moe"}
TIMES = {
    "layer_s", "moe_layer_s", "dispatch_s", "collective_s", "base_s", "per_doubling_s", "latency_s", "tp_step_s"
}  # fmt: skip
"""Fields of hardware.py by the bounds of their numbers; all others are at least 0."""


@dataclass(frozen=True, slots=True)
class EngineConstants:
    """Step-time constants of one kind of machine, and the rows that they were fitted to."""

    fitted_to: str
    decode: DecodeConstants
    prefill: PrefillConstants


@dataclass(frozen=True, slots=True)
class HardwareFile:
    """A kind of machine. Constants of its own, or those of another file (`constants_of`) on its own datasheet."""

    accelerator: AcceleratorType
    node: NodeTopology
    sources: tuple[str, ...]
    constants: EngineConstants | None = None
    constants_of: str = ""


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A model's shape."""

    model: ModelShape
    sources: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ProfileFile:
    """A named profile: a kind of machine, and what this cluster has on top."""

    hardware: str
    """Name of one of the package's, or a path relative to this file."""
    notes: tuple[str, ...] = ()
    operations: str = ""
    """Path relative to this file; empty: the package's own."""
    extra: Extra = dataclasses.field(default_factory=Extra)


@dataclass(frozen=True, slots=True)
class Profile:
    """A machine ready for computing times, and where its figures come from."""

    name: str
    hardware: Hardware
    sources: tuple[str, ...]


def names(kind: str = "") -> list[str]:
    """The package's own: profiles, or with `kind` "hardware" or "models" those."""
    return sorted(p.stem for p in (FOLDER / kind).glob("*.yaml") if p.stem != "operations")


def profile(name: str) -> Profile:
    """A named profile, a profile file, or a hardware file or name (a profile without extra)."""
    path = _find(name, "", "hardware")
    if _is_hardware(path):
        return _profile(path, ProfileFile(hardware=str(path.resolve())))
    return _profile(path, read(path, ProfileFile))


def model(name: str) -> ModelShape:
    """A model by name (as its maker writes it, or in lower case) or by path."""
    path = _find(name if _is_path(name) else name.lower(), "models")
    found = read(path, ModelFile).model
    if found.experts_per_token > found.experts or (found.experts and not found.experts_per_token):
        raise ConfigError(
            f"{path}: experts_per_token is {found.experts_per_token} of {found.experts} experts; expected 1 to "
            f"{found.experts}, or 0 of 0 for a dense model"
        )
    if found.active_parameters > found.parameters or found.dense_parameters < 0:
        own = found.parameters - found.dense_parameters
        raise ConfigError(
            f"{path}: parameters is {found.parameters:g}; expected at least the {own:g} of its experts and embeddings, "
            f"and the {found.active_parameters:g} of active_parameters"
        )
    return found


def hardware_file(name: str) -> HardwareFile:
    """A hardware file by name or path, its constants put in."""
    path = _find(name, "hardware")
    found = read(path, HardwareFile)
    if (found.constants is None) == (not found.constants_of):
        raise ConfigError(f"{path}: expected either constants or constants_of, the name of a file that has some")
    if found.constants is not None:
        return found
    other = read(_find(_beside(path, found.constants_of), "hardware"), HardwareFile)
    if other.constants is None:
        raise ConfigError(f"{path}: constants_of {found.constants_of!r} has no constants of its own; name one that has")
    return dataclasses.replace(found, constants=other.constants)


def operations_file(path: str | Path = "") -> Operations:
    """Memory, weight sync, sleep and wake, moves, training; the package's own without a path."""
    return read(Path(path) if path else FOLDER / "operations.yaml", Operations)


def assemble(machine: HardwareFile, software: Operations, extra: Extra) -> Hardware:
    """A machine of a file that has constants."""
    if machine.constants is None:
        raise ConfigError(f"{machine.accelerator.name}: no constants; `libra calibrate` fits them")
    constants = machine.constants
    return Hardware(machine.accelerator, machine.node, constants.decode, constants.prefill, software, extra)


def _profile(path: Path, file: ProfileFile) -> Profile:
    machine = hardware_file(_beside(path, file.hardware))
    software = operations_file(_beside(path, file.operations) if file.operations else "")
    return Profile(
        path.stem, assemble(machine, software, file.extra), (*machine.sources, *software.sources, *file.notes)
    )


def _is_hardware(path: Path) -> bool:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return False  # reading it in earnest says what is wrong
    return isinstance(content, dict) and "accelerator" in content


def _beside(path: Path, name: str) -> str:
    """A path that a file names is relative to it; a name stays one."""
    return str(path.parent / name) if _is_path(name) else name


def _is_path(name: str) -> bool:
    return name.endswith((".yaml", ".yml"))


def _find(name: str, *kinds: str) -> Path:
    """A path as it is; a name among the package's own of these kinds."""
    if _is_path(name):
        return Path(name)
    for kind in kinds:
        path = FOLDER / kind / f"{name}.yaml"
        if path.exists() and name in names(kind):
            return path
    known = ", ".join(n for kind in kinds for n in names(kind))
    raise ConfigError(f"no profile {name!r}; expected one of {known}, or a path that ends in .yaml")


# ---- files into dataclasses


def read(path: str | Path, kind: type[T]) -> T:
    """A YAML file into a dataclass; ConfigError names file, line, what was found and what was expected."""
    checked: Any = kind
    fields = config.load(path, _strict(checked)).model_dump()
    try:
        return typing.cast(T, _value(checked, fields))
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None


@functools.cache
def _strict(kind: Any) -> type[Strict]:
    """The dataclass as a configuration model: no unknown keys, no numbers out of bounds."""
    hints = typing.get_type_hints(kind)
    fields: dict[str, Any] = {
        f.name: (_annotation(hints[f.name], *_bounds(f.name)), _default(f)) for f in dataclasses.fields(kind)
    }
    return typing.cast(type[Strict], pydantic.create_model(kind.__name__, __base__=Strict, **fields))


def _bounds(name: str) -> tuple[float, float]:
    """Least and greatest number of a field."""
    if name in SHARES:
        return LEAST_SHARE, 1
    if name == "memory_fraction":  # 0: none
        return 0, 1
    least = LEAST_RATE if name in RATES else 1 if name in AT_LEAST_ONE else 0
    return least, LONGEST_S if name in TIMES else GREATEST


def _annotation(hint: Any, least: float, greatest: float) -> Any:
    """A type of a field, its dataclasses made strict and its numbers bounded."""
    if dataclasses.is_dataclass(hint):
        kind: Any = hint
        return _strict(kind)
    if hint in (int, float):
        return Annotated[hint, pydantic.Field(ge=least, le=greatest, allow_inf_nan=False)]
    if typing.get_origin(hint) in (tuple, types.UnionType):
        parts = tuple(
            a if a in (Ellipsis, type(None)) else _annotation(a, least, greatest) for a in typing.get_args(hint)
        )
        made: Any = types.GenericAlias(tuple, parts)
        return made if typing.get_origin(hint) is tuple else functools.reduce(operator.or_, parts)
    return hint


def _default(field: Any) -> Any:
    """Ellipsis is pydantic's word for a required field."""
    if field.default is not dataclasses.MISSING:
        return field.default
    if field.default_factory is not dataclasses.MISSING:
        return pydantic.Field(default_factory=_strict(field.default_factory))
    return ...


def _value(hint: Any, found: Any) -> Any:
    """What pydantic has checked, as dataclasses."""
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        hints = typing.get_type_hints(hint)
        return hint(**{name: _value(hints[name], value) for name, value in found.items()})
    if typing.get_origin(hint) is types.UnionType and found is not None:
        return _value(typing.get_args(hint)[0], found)
    if typing.get_origin(hint) is tuple and dataclasses.is_dataclass(typing.get_args(hint)[0]):
        return tuple(_value(typing.get_args(hint)[0], item) for item in found)
    return found

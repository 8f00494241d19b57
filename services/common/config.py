"""Configuration files: strict YAML into pydantic models. A wrong key is refused with file, line and nearest key.

`${NAME}` stands for an environment variable, `${NAME:-text}` for one with a default, `$$` for a dollar sign, as in
compose files: the same file then serves each of several containers or machines.
"""

import difflib
import os
import re
import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

import pydantic
import yaml

from services.common.errors import ConfigError

M = TypeVar("M", bound=pydantic.BaseModel)

VARIABLE = re.compile(r"\$(?:\$|\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^}\n]*))?\})")


class Strict(pydantic.BaseModel):
    """Base of all configuration models: unknown keys are errors. Numbers may be written as text ("1e-5" is text in
    YAML 1.1), and `true` is 1 where a number is expected.
    """

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)


def load(path: str | Path, model: type[M]) -> M:
    """Reads `path` into `model`; ConfigError names file, line, what was found, what was expected."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the configuration file: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 at byte {error.start}; expected YAML as UTF-8 text") from None
    except ValueError as error:  # a NUL character in the name
        raise ConfigError(f"{str(path)!r}: cannot read the configuration file: {error}") from None
    return loads(text, model, str(path))


def loads(text: str, model: type[M], source: str) -> M:
    """As `load`, from text; `source` is named in messages."""
    text = interpolate(text, os.environ, source)
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{source}:{mark.line + 1}" if mark else source
        raise ConfigError(f"{where}: not valid YAML: {getattr(error, 'problem', error)}") from None
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, no such day, nesting without end
        raise ConfigError(f"{source}: cannot be read as YAML: {error}; expected keys and values") from None
    if data is None:
        data = {}
    _refuse_repeated(root, source)
    if not isinstance(data, dict):
        raise ConfigError(f"{source}:1: expected keys and values at the top, found a {type(data).__name__}")
    try:
        return model.model_validate(data)
    except pydantic.ValidationError as error:
        raise ConfigError("\n".join(_describe(e, root, model, source) for e in error.errors())) from None


def interpolate(text: str, variables: Mapping[str, str], source: str) -> str:
    """The text with its variables put in; whole-line comments are left alone. ConfigError if one has no value."""
    lines = []
    for number, line in enumerate(text.splitlines(keepends=True), start=1):

        def value(match: re.Match[str], number: int = number) -> str:
            name, default = match["name"], match["default"]
            if name is None:
                return "$"
            found = variables.get(name, "") or default
            if found is None:
                raise ConfigError(
                    f"{source}:{number}: the environment variable {name} is not set; set it, or write "
                    f"${{{name}:-DEFAULT}}"
                )
            return found

        lines.append(line if line.lstrip().startswith("#") else VARIABLE.sub(value, line))
    return "".join(lines)


def _refuse_repeated(root: Any, source: str) -> None:
    """ConfigError for a key that a mapping has twice: YAML would take the last and drop the others without a word."""
    todo, seen = [root], set[int]()
    while todo:
        node = todo.pop()
        if id(node) in seen:  # an alias
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            todo += node.value
        elif isinstance(node, yaml.MappingNode):
            todo += [value for _, value in node.value]
            lines: dict[tuple[str, str], int] = {}
            for key in (k for k, _ in node.value if isinstance(k, yaml.ScalarNode)):
                line, name = key.start_mark.line + 1, (key.tag, key.value)
                if name in lines:
                    where = f"{source}:{line}: the key {key.value!r}"
                    raise ConfigError(f"{where} is in line {lines[name]} already; expected each key once")
                lines[name] = line


def _describe(error: Any, root: Any, model: type[pydantic.BaseModel], source: str) -> str:
    path: Sequence[str | int] = error["loc"]
    line = _line(root, path)
    key = ".".join(str(p) for p in path)
    if error["type"] == "extra_forbidden":
        known = _known_keys(model, path[:-1])
        near = difflib.get_close_matches(str(path[-1]), known, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}?" if near else f"known keys here: {', '.join(known)}"
        return f"{source}:{line}: unknown key {key!r}; {hint}"
    if error["type"] == "missing":
        return f"{source}:{line}: {key!r} is missing; it is required"
    if not path:  # said of the whole file
        return f"{source}:{line}: {error['msg'].removeprefix('Value error, ')}"
    found = reprlib.repr(error["input"])  # bounded in depth too: aliases make a few lines as large as memory
    return f"{source}:{line}: {key!r}: {error['msg'].removeprefix('Value error, ')} (found {found[:80]})"


def _line(node: Any, path: Sequence[str | int]) -> int:
    """Line of the deepest part of `path` that the file has, from 1."""
    line = 1
    for part in path:
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                if key.value == str(part):
                    line, node = key.start_mark.line + 1, value
                    break
            else:
                break
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
            line = node.start_mark.line + 1
        else:
            break
    return line


def _known_keys(model: Any, path: Sequence[str | int]) -> list[str]:
    for part in path:
        if isinstance(part, int):
            continue
        field = getattr(model, "model_fields", {}).get(part)
        if field is not None:
            model = _inner_model(field.annotation)
    return sorted(getattr(model, "model_fields", {}))


def _inner_model(annotation: Any) -> Any:
    if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
        return annotation
    if get_origin(annotation) in (list, tuple, dict, Union, UnionType):
        for arg in get_args(annotation):
            inner = _inner_model(arg)
            if inner is not None:
                return inner
    return None

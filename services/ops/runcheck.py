"""Everything that can be wrong with a run, looked at before anything starts. Each check raises ConfigError."""

import json
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from services.common import wire
from services.common.errors import ConfigError, LibraError
from services.common.rpc.channel import connect
from services.common.rpc.status import from_rpc_error
from services.ops.runfile import RunConfig

MAX_TASK_BYTES = 16 * 1024
MAX_SHOWN = 5
"""Bad lines named in one message."""
CALL_SECONDS = 5.0


@dataclass(frozen=True)
class Tasks:
    """A task file that was read: its bytes, how many tasks, and the longest one."""

    data: bytes
    count: int
    longest: str


def tasks(path: Path) -> Tasks:
    """Reads a task file; names each bad line by its number."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the task file: {error.strerror}") from None
    bad: list[str] = []
    count, longest = 0, ""
    # line breaks at the very end make no lines of their own
    for number, raw in enumerate(data.rstrip().split(b"\n") if data.strip() else [], start=1):
        wrong = _wrong_with(raw)
        if wrong:
            bad.append(f"{path}:{number}: {wrong}")
            continue
        count += 1
        longest = max(longest, raw.decode(), key=len)
    if bad:
        more = f"\n… and {len(bad) - MAX_SHOWN} more bad lines" if len(bad) > MAX_SHOWN else ""
        raise ConfigError("\n".join(bad[:MAX_SHOWN]) + more)
    if not count:
        raise ConfigError(f"{path}: no tasks; expected one JSON object per line")
    return Tasks(data, count, longest)


def _wrong_with(raw: bytes) -> str:
    if not raw.strip():
        return "an empty line; expected one JSON object per line"
    if len(raw) > MAX_TASK_BYTES:
        return f"the task has {len(raw)} bytes; at most {MAX_TASK_BYTES}"
    try:
        task = json.loads(raw)
    except UnicodeDecodeError:
        return "not UTF-8"
    except ValueError as error:
        # the position, not the text: tasks do not go into logs
        where = f" at column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
        return f"not valid JSON{where}: {getattr(error, 'msg', error)}"
    if not isinstance(task, dict):
        return f"expected a JSON object, found a {type(task).__name__}"
    return ""


def model(config: RunConfig, source: Path) -> dict[str, Any]:
    """The model's config.json; {} for a hub name, which only the workers can fetch."""
    path = config.model_path(source)
    if path is None:
        return {}
    if not path.is_dir():
        raise ConfigError(
            f"{source}: 'model': no folder {path}; expected one in Hugging Face format (config.json, *.safetensors, "
            "tokenizer.json) or a hub name like organisation/name"
        )
    if not any(path.glob("*.safetensors")):
        raise ConfigError(f"{source}: 'model': {path} has no *.safetensors file; the weights are missing")
    try:
        found = json.loads((path / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{source}: 'model': {path}/config.json cannot be read: {error}") from None
    return found if isinstance(found, dict) else {}


def environment_address(config: RunConfig, source: Path, known: dict[str, str]) -> str:
    """Where the environment is: the run file's address, else that of the cluster's own one; "" if unknown here."""
    section = config.environment
    if section.address:
        host, _, port = section.address.rpartition(":")
        if not host or not port.isdigit():
            raise ConfigError(f"{source}: 'environment.address': {section.address!r} is no address; expected host:port")
        return section.address
    return known.get(section.type, "")


async def environment(config: RunConfig, source: Path, address: str) -> None:
    """Asks the environment to describe itself: reachable, of this contract, of the wanted type and version."""
    where = f"{source}: 'environment': {address}"
    async with connect(address) as channel:
        stub = wire.ToolEnvServiceStub(channel)
        try:
            described = await stub.Describe(wire.DescribeRequest(), timeout=CALL_SECONDS, wait_for_ready=False)
        except grpc.aio.AioRpcError as error:
            failure = from_rpc_error(error)
            if failure.status is grpc.StatusCode.UNIMPLEMENTED:
                raise ConfigError(
                    f"{where} answers, but not as libra.v1.ToolEnvService: another service, or one of another version "
                    "of the contract"
                ) from None
            raise ConfigError(
                f"{where} cannot be reached: {failure.message}; start the environment or correct its address"
            ) from None
    wanted = config.environment
    if described.environment != wanted.type:
        raise ConfigError(f"{where} is environment {described.environment!r}; the run wants {wanted.type!r}")
    if wanted.version and described.version != wanted.version:
        raise ConfigError(f"{where} has version {described.version!r}; the run wants {wanted.version!r}")


def replicas(config: RunConfig, source: Path, accelerators: Iterable[wire.Accelerator]) -> None:
    """A step must give every trainer replica something: at least one group for each that there can be."""
    if config.kind != "TRAIN":
        return
    most = sum(a.pool in (wire.POOL_CORE_TRAINING, wire.POOL_HYBRID) for a in accelerators)
    if most == 0:
        raise ConfigError(
            f"{source}: the cluster has no accelerator in pool CORE_TRAINING or HYBRID; a TRAIN run needs one"
        )
    if config.batch.groups < most:
        raise ConfigError(
            f"{source}: 'batch.groups': {config.batch.groups} groups cannot be divided over up to {most} trainer "
            f"replicas; raise batch.groups to at least {most}"
        )


async def prompt(config: RunConfig, source: Path, details: dict[str, Any], longest: str, address: str) -> None:
    """The prompt of the longest task must fit the context, where the tokenizer and the context are known here.

    Opens one session at the environment for that task, as the first turn would, and closes it again.
    """
    context = int(details.get("max_position_embeddings") or 0)
    limits = [n for n in (context, config.limits.max_sequence_tokens) if n]
    path = config.model_path(source)
    tokenizer = path / "tokenizer.json" if path else None
    if not limits or not address or tokenizer is None or not tokenizer.exists():
        return
    try:
        import tokenizers
    except ImportError:
        return
    text = await _first_prompt(config, source, longest, address)
    count = len(tokenizers.Tokenizer.from_file(str(tokenizer)).encode(text).ids)
    if count >= min(limits):
        raise ConfigError(
            f"{source}: the prompt of the longest task has {count} tokens, but the context has {min(limits)}; shorten "
            "the task, raise limits.max_sequence_tokens or use a model with a longer context"
        )


async def _first_prompt(config: RunConfig, source: Path, task: str, address: str) -> str:
    trajectory = f"runs/{config.run}/trajectories/validate-{uuid.uuid4().hex[:8]}"
    async with connect(address) as channel:
        stub = wire.ToolEnvServiceStub(channel)
        request = wire.OpenSessionRequest(
            request_id=str(uuid.uuid4()), task_json=task, trajectory=trajectory, epoch=1, ttl=wire.duration(30.0)
        )
        try:
            opened = await stub.OpenSession(request, timeout=CALL_SECONDS)
            await stub.CloseSession(wire.CloseSessionRequest(session=opened.session, epoch=1), timeout=CALL_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise ConfigError(
                f"{source}: 'environment': {address} refused the longest task: {from_rpc_error(error).message}"
            ) from None
    return str(opened.instructions + opened.observation)


def refused(source: Path, error: LibraError) -> ConfigError:
    """The scheduler's refusal of the run, in the run file's terms."""
    return ConfigError(f"{source}: the scheduler refused the run: {error.message} [{error.reason}]")

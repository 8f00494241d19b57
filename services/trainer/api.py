"""TrainerService: progress, checkpoints, and weights for those who load them from here."""

from collections.abc import AsyncIterator

from services.common import errors, wire
from services.common.errors import LibraError
from services.common.rpc.server import Context
from services.trainer.agent import TrainerAgent
from services.trainer.checkpoints import Checkpoint

CHUNK_BYTES = 1 << 20
MAX_REDO = 256


class TrainerApi(wire.TrainerServiceServicer):
    """Direct calls on one trainer worker."""

    def __init__(self, agent: TrainerAgent) -> None:
        self._agent = agent

    async def GetProgress(self, request: wire.GetProgressRequest, context: Context) -> wire.GetProgressResponse:
        """Where the trainer stands; only of the run asked for."""
        del context
        answer = wire.GetProgressResponse(load=self._agent.load())
        policy = self._agent.loop.policy if self._agent.loop else None
        if policy is None or request.run not in ("", policy.run.name):
            return answer
        answer.versions.append(policy.version.ref(policy.id))
        answer.checkpoints.extend(_info(c, policy.id) for c in policy.kept_checkpoints)
        answer.redo.extend(policy.redo[:MAX_REDO])
        answer.metrics.update(policy.metrics)
        return answer

    async def Checkpoint(self, request: wire.CheckpointRequest, context: Context) -> wire.CheckpointResponse:
        """Saves the newest state."""
        del context
        loop = self._agent.loop
        if not request.request_id:
            raise errors.invalid_field("request_id is missing; send a UUID")
        if loop is None or loop.grant.generation != request.fence.generation:
            held = loop.grant.generation if loop else 0
            raise errors.stale_fence(
                f"the replica is held under generation {held}, the call is for {request.fence.generation}",
                expected=str(held), actual=str(request.fence.generation),
            )  # fmt: skip
        policy_id = loop.policy.id if loop.policy else ""
        if request.policy not in ("", policy_id):
            raise errors.not_found(request.policy)
        return wire.CheckpointResponse(checkpoint=_info(await self._agent.checkpoint(), policy_id))

    async def ReadWeights(
        self, request: wire.ReadWeightsRequest, context: Context
    ) -> AsyncIterator[wire.ReadWeightsResponse]:
        """Streams a shard of a published version that is still in memory."""
        del context
        loop = self._agent.loop
        if loop is None or loop.grant.generation != request.fence.generation:
            raise errors.stale_fence("this replica no longer serves under that generation; read the durable files")
        files = next(
            (
                f
                for f in (loop.policy.kept_files if loop.policy else ())
                if (f.version.lineage, f.version.number) == (request.version.lineage, request.version.number)
            ),
            None,
        )
        if files is None:
            version = f"{request.version.lineage}-{request.version.number}"
            raise LibraError("VERSION_UNUSABLE", f"version {version} is not in memory here; read its durable files")
        if request.shard != files.manifest.shards[0].name:
            raise errors.not_found(request.shard)
        if not 0 <= request.offset <= len(files.data):
            raise errors.invalid_field(f"offset {request.offset}: the shard has {len(files.data)} bytes")
        for offset in range(request.offset, len(files.data), CHUNK_BYTES):
            yield wire.ReadWeightsResponse(offset=offset, data=files.data[offset : offset + CHUNK_BYTES])


def _info(checkpoint: Checkpoint, policy: str) -> wire.CheckpointInfo:
    return wire.CheckpointInfo(
        version=checkpoint.version.ref(policy),
        index=checkpoint.index,
        create_time=wire.timestamp(checkpoint.create_time),
    )

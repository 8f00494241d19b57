"""The scheduler as a training thread sees it: blocking calls that ride out outages and can be broken off."""

import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc

from services.common import log, wire
from services.common.errors import LibraError
from services.common.rpc.channel import connect_sync
from services.common.rpc.status import from_rpc_error

_log = log.get(__name__)

CALL_TIMEOUT_SECONDS = 10.0
RETRY_SECONDS = (0.05, 1.0)
POLL_SECONDS = 0.1
PAGE_MEMBERS = 256
PAGE_RESOURCES = 1_000
MAX_RESOURCES = 100_000
TRANSIENT = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "NOT_LEADER", "CANCELLED")
"""Failures that say nothing about the request: the same call is made again."""


class Stopped(Exception):
    """The training thread was told to stop while it waited."""


@dataclass(frozen=True, slots=True)
class Taken:
    """A step's manifest with the roster that it was handed out under."""

    manifest: wire.Manifest
    roster: wire.Roster


class Coordinator:
    """Calls on TrajectoryService and AdminService. One per training thread.

    `caller` signs. `stopping` (while waiting for a batch) and `abandoned` (in all else: a step once begun is finished)
    are asked about every 100 ms while a call waits, and raise Stopped out of it.
    """

    def __init__(
        self,
        address: str,
        caller: Callable[[], wire.Caller],
        stopping: Callable[[], bool],
        abandoned: Callable[[], bool],
    ) -> None:
        self._channel = connect_sync(address)
        self._work = wire.TrajectoryServiceStub(self._channel)
        self._admin = wire.AdminServiceStub(self._channel)
        self._caller = caller
        self._stopping, self._abandoned = stopping, abandoned

    def close(self) -> None:
        """Closes the channel."""
        self._channel.close()

    def run(self, name: str) -> wire.Run:
        """The run as it is now."""
        answer: wire.GetRunResponse = self._call(self._work.GetRun, wire.GetRunRequest(name=name))
        return answer.run

    def take(self, run: wire.Run, policy: str, step: int, wait: float, idle: Callable[[], None]) -> Taken:
        """The manifest of the step. LibraError NO_PROGRESS after `wait` seconds without one.

        `idle` is called about every 100 ms meanwhile.
        """
        request = wire.TakeBatchRequest(
            request_id=_request_id(), run=run.name, policy=policy, step=step, size=run.batch, wait=wire.duration(wait)
        )
        answer: wire.TakeBatchResponse = self._call(
            self._work.TakeBatch, request, timeout=wait + 5.0, idle=idle, ends=self._stopping
        )
        return Taken(answer.manifest, answer.roster)

    def members(self, manifest: str) -> list[wire.ManifestMember]:
        """All members in manifest order."""
        members: list[wire.ManifestMember] = []
        request = wire.ListManifestMembersRequest(manifest=manifest, page_size=PAGE_MEMBERS)
        while True:
            answer: wire.ListManifestMembersResponse = self._call(self._work.ListManifestMembers, request)
            members.extend(answer.members)
            if not answer.next_page_token:
                return members
            request.page_token = answer.next_page_token

    def commit(
        self, taken: Taken, base: wire.VersionRef, members: list[wire.RosterMember], trainable_tokens: int
    ) -> wire.VersionRef:
        """The version that the step made. COMMIT_REFUSED, STEP_TAKEN: the gradients must be discarded.

        Asked again through outages until the scheduler has answered, since only its answer decides.
        """
        request = wire.CommitStepRequest(
            request_id=_request_id(),
            manifest=taken.manifest.name,
            base_version=base,
            roster_revision=taken.roster.revision,
            members=members,
            trainable_tokens=trainable_tokens,
        )
        answer: wire.CommitStepResponse = self._call(self._work.CommitStep, request)
        return answer.version

    def give_back(self, manifest: str, broken: list[str], code: str, text: str) -> None:
        """Returns a manifest uncommitted; trajectories named in `broken` could not be read."""
        request = wire.ReturnBatchRequest(
            request_id=_request_id(), manifest=manifest, broken=broken[:256], reason=wire.Reason(code=code, text=text)
        )
        self._call(self._work.ReturnBatch, request)

    def publish(
        self, run: str, version: wire.VersionRef, files: wire.WeightManifest, checkpoint: wire.BlobRef | None
    ) -> None:
        """Makes a version loadable, or adds a checkpoint to a published one."""
        request = wire.PublishWeightsRequest(request_id=_request_id(), run=run, version=version, files=files)
        if checkpoint is not None:
            request.checkpoint.CopyFrom(checkpoint)
        self._call(self._work.PublishWeights, request)

    def runs(self) -> list[wire.Run]:
        """All runs, also those that are over."""
        return [r.run for r in self._list("", wire.RESOURCE_KIND_RUN)]

    def versions(self, run: str) -> list[wire.WeightVersion]:
        """All weight versions of the run."""
        return [r.weight_version for r in self._list(run, wire.RESOURCE_KIND_WEIGHT_VERSION)]

    def redo_log(self, run: str, lineage: int, above: int) -> list[wire.Manifest]:
        """Committed manifests of a lineage with a base version of at least `above`, oldest first."""
        done = (wire.MANIFEST_STATE_COMMITTED, wire.MANIFEST_STATE_COVERED)
        manifests = [r.manifest for r in self._list(run, wire.RESOURCE_KIND_MANIFEST)]
        found = [
            m
            for m in manifests
            if m.state in done and m.base_version.lineage == lineage and m.base_version.number >= above
        ]
        return sorted(found, key=lambda m: m.base_version.number)

    def _list(self, prefix: str, kind: "wire.ResourceKind.ValueType") -> Iterator[wire.Resource]:
        request = wire.ListResourcesRequest(
            selector=wire.Selector(kinds=[kind], name_prefix=prefix), page_size=PAGE_RESOURCES
        )
        for _ in range(MAX_RESOURCES // PAGE_RESOURCES):
            answer: wire.ListResourcesResponse = self._call(self._admin.ListResources, request)
            yield from answer.resources
            if not answer.next_page_token:
                return
            request.page_token = answer.next_page_token

    def _call(
        self,
        method: Any,
        request: Any,
        *,
        timeout: float = CALL_TIMEOUT_SECONDS,
        idle: Callable[[], None] = lambda: None,
        ends: Callable[[], bool] | None = None,
    ) -> Any:
        ends = ends or self._abandoned
        delay = RETRY_SECONDS[0]
        while True:
            if "caller" in request.DESCRIPTOR.fields_by_name:
                request.caller.CopyFrom(self._caller())
            call = method.future(request, timeout=timeout)
            try:
                return self._result(call, idle, ends)
            except grpc.RpcError as error:
                failure = from_rpc_error(error)
                if failure.reason not in TRANSIENT:
                    raise failure from None
                _log.debug("call will be made again", error=str(failure))
            finally:
                call.cancel()
            self._pause(delay, ends)
            delay = min(delay * 2, RETRY_SECONDS[1])

    @staticmethod
    def _result(call: Any, idle: Callable[[], None], ends: Callable[[], bool]) -> Any:
        while True:
            try:
                return call.result(timeout=POLL_SECONDS)
            except grpc.FutureTimeoutError:
                if ends():
                    raise Stopped from None
                idle()

    @staticmethod
    def _pause(seconds: float, ends: Callable[[], bool]) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if ends():
                raise Stopped
            time.sleep(min(0.05, max(0.0, deadline - time.monotonic())))


def _request_id() -> str:
    return str(uuid.uuid4())


def reason_of(error: LibraError) -> wire.Reason:
    """The error as a reason for records."""
    return wire.Reason(code=error.reason, text=error.message[:1024])

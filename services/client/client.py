"""The asynchronous client: runs, groups and trajectories for frameworks, and what operators read and change."""

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from services.client.calls import Calls, request_id, within
from services.common import wire

RUN_OVER = (wire.RUN_STATE_FINISHED, wire.RUN_STATE_CANCELLED)


@dataclass(frozen=True)
class Submitted:
    """Groups that were admitted; a watch from `revision` + 1 shows all that follows."""

    groups: tuple[str, ...]
    revision: int


@dataclass(frozen=True)
class Listed:
    """A list of resources and the revision it shows; a watch from `revision` + 1 misses nothing."""

    resources: tuple[wire.Resource, ...]
    revision: int


class LibraClient:
    """A client of one scheduler. Use as `async with LibraClient("127.0.0.1:7070") as libra:`.

    Every call has a deadline (`timeout_s`); mutations draw a request id unless given one and are tried again with the
    same id for `retry_for_s` while the scheduler is away. Failures are LibraError with a stable `reason`.
    """

    def __init__(self, address: str, *, timeout_s: float = 10.0, retry_for_s: float = 30.0) -> None:
        self._calls = Calls(address, timeout_s, retry_for_s)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the channel."""
        await self._calls.close()

    # ---- runs

    async def create_run(
        self, run_id: str, run: wire.Run, *, validate_only: bool = False, request: str | None = None
    ) -> wire.Run:
        """Creates a run and returns it with all defaults filled in; `validate_only` checks and creates nothing."""
        message = wire.CreateRunRequest(
            request_id=request_id(request), run_id=run_id, run=run, validate_only=validate_only
        )
        answer: wire.CreateRunResponse = await self._calls.unary(self._calls.trajectories.CreateRun, message, 30.0)
        return answer.run

    async def get_run(self, run: str) -> wire.Run:
        """Reads a run by id or name."""
        message = wire.GetRunRequest(name=run_name(run))
        answer: wire.GetRunResponse = await self._calls.unary(self._calls.trajectories.GetRun, message)
        return answer.run

    async def submit_groups(
        self,
        run: str,
        tasks: Sequence[wire.Task | Mapping[str, Any]],
        *,
        priority: int = 0,
        request: str | None = None,
    ) -> Submitted:
        """Admits one group for each task, all or none. A mapping is a task's JSON content; its "id" names the task."""
        message = wire.SubmitGroupsRequest(
            request_id=request_id(request), run=run_name(run), tasks=[as_task(t) for t in tasks], priority=priority
        )
        answer: wire.SubmitGroupsResponse = await self._calls.unary(self._calls.trajectories.SubmitGroups, message)
        return Submitted(tuple(answer.groups), answer.stamp.revision)

    async def watch_run(
        self,
        run: str,
        *,
        start_revision: int = 0,
        kinds: Sequence["wire.ResourceKind.ValueType"] = (),
        states: Sequence[str] = (),
        with_resource: bool = True,
    ) -> AsyncIterator[wire.Event]:
        """The run's events in order, each once, across breaks of the connection; ends only when the caller stops.

        `start_revision` 0 begins now. COMPACTED if it is too old: list, then watch from the list's revision + 1.
        """
        options = wire.WatchOptions(
            start_revision=start_revision,
            selector=wire.Selector(kinds=kinds, states=states),
            with_resource=with_resource,
        )
        name = run_name(run)

        def open_stream(current: wire.WatchOptions, timeout: float) -> Any:
            message = wire.WatchRunRequest(run=name, options=current)
            return self._calls.trajectories.WatchRun(message, timeout=timeout)

        async for events in self._calls.watch(open_stream, options):
            for event in events:
                yield event

    async def wait_run(self, run: str, timeout_s: float) -> wire.Run:
        """The run once it is FINISHED or CANCELLED; DEADLINE_EXCEEDED after `timeout_s`."""

        async def ended() -> wire.Run:
            # watch first, then read: what happens between the two is seen by the watch
            first = await self._calls.unary(self._calls.trajectories.GetRun, wire.GetRunRequest(name=run_name(run)))
            if first.run.state in RUN_OVER:
                return first.run  # type: ignore[no-any-return]
            events = self.watch_run(run, start_revision=first.stamp.revision + 1, kinds=[wire.RESOURCE_KIND_RUN])
            async for event in events:
                if event.to_state in ("FINISHED", "CANCELLED"):
                    break
            return await self.get_run(run)

        return await within(ended(), timeout_s, f"{run_name(run)} did not end")

    # ---- trajectories

    async def get_trajectory(self, name: str, *, full: bool = False) -> wire.Trajectory:
        """Reads one trajectory; `full` with its sequences and turns."""
        message = wire.GetTrajectoryRequest(name=name, view=_view(full))
        answer: wire.GetTrajectoryResponse = await self._calls.unary(self._calls.trajectories.GetTrajectory, message)
        return answer.trajectory

    async def list_trajectories(
        self,
        parent: str,
        *,
        states: Sequence["wire.TrajectoryState.ValueType"] = (),
        full: bool = False,
        limit: int | None = None,
    ) -> list[wire.Trajectory]:
        """The trajectories of a run (by id or name) or of a group, in admission order."""
        message = wire.ListTrajectoriesRequest(
            parent=run_name(parent), states=states, page_size=min(limit or 1_000, 1_000), view=_view(full)
        )
        found, _ = await self._calls.pages(
            self._calls.trajectories.ListTrajectories, message, lambda a: a.trajectories, limit
        )
        return found

    async def cancel(
        self, names: Sequence[str], *, note: str = "", request: str | None = None
    ) -> wire.CancelTrajectoriesResponse:
        """Ends trajectories or groups for good; those terminal or in a batch are left alone and named."""
        message = wire.CancelTrajectoriesRequest(request_id=request_id(request), names=names, note=note)
        answer: wire.CancelTrajectoriesResponse = await self._calls.unary(
            self._calls.trajectories.CancelTrajectories, message
        )
        return answer

    async def list_manifest_members(self, manifest: str) -> list[wire.ManifestMember]:
        """What a training step took, in manifest order."""
        message = wire.ListManifestMembersRequest(manifest=manifest)
        found, _ = await self._calls.pages(self._calls.trajectories.ListManifestMembers, message, lambda a: a.members)
        return found

    # ---- reading everything

    async def get_resource(self, name: str) -> wire.Resource:
        """Reads any resource by its full name."""
        message = wire.GetResourceRequest(name=name)
        answer: wire.GetResourceResponse = await self._calls.unary(self._calls.admin.GetResource, message)
        return answer.resource

    async def list_resources(
        self,
        kind: "wire.ResourceKind.ValueType",
        *,
        prefix: str = "",
        states: Sequence[str] = (),
        limit: int | None = None,
    ) -> Listed:
        """All resources of a kind, ordered by name."""
        message = wire.ListResourcesRequest(
            selector=wire.Selector(kinds=[kind], name_prefix=prefix, states=states),
            page_size=min(limit or 1_000, 1_000),
        )
        found, revision = await self._calls.pages(
            self._calls.admin.ListResources, message, lambda a: a.resources, limit
        )
        return Listed(tuple(found), revision)

    async def list_events(
        self,
        *,
        selector: wire.Selector | None = None,
        start_revision: int = 0,
        limit: int | None = None,
    ) -> list[wire.Event]:
        """Recorded events, oldest first."""
        message = wire.ListEventsRequest(
            selector=selector, start_revision=start_revision, page_size=min(limit or 1_000, 1_000)
        )
        found, _ = await self._calls.pages(self._calls.admin.ListEvents, message, lambda a: a.events, limit)
        return found

    async def watch(
        self,
        *,
        selector: wire.Selector | None = None,
        start_revision: int = 0,
        with_resource: bool = False,
    ) -> AsyncIterator[wire.Event]:
        """Events of everything selected, as `watch_run`."""
        options = wire.WatchOptions(start_revision=start_revision, selector=selector, with_resource=with_resource)

        def open_stream(current: wire.WatchOptions, timeout: float) -> Any:
            return self._calls.admin.Watch(wire.WatchRequest(options=current), timeout=timeout)

        async for events in self._calls.watch(open_stream, options):
            for event in events:
                yield event

    async def explain(self, name: str) -> wire.ExplainResponse:
        """Why a resource waits, idles or stalls."""
        answer: wire.ExplainResponse = await self._calls.unary(
            self._calls.admin.Explain, wire.ExplainRequest(name=name)
        )
        return answer

    # ---- what operators change

    async def propose_plan(self, *, horizon_s: float | None = None, request: str | None = None) -> wire.Plan:
        """A plan for the fleet as it is; changes nothing."""
        message = wire.ProposePlanRequest(request_id=request_id(request))
        if horizon_s is not None:
            message.horizon.CopyFrom(wire.duration(horizon_s))
        answer: wire.ProposePlanResponse = await self._calls.unary(self._calls.admin.ProposePlan, message)
        return answer.plan

    async def apply_plan(self, plan: str, *, allow_partial: bool = False, request: str | None = None) -> wire.Plan:
        """Carries a proposed plan out; PLAN_OUTDATED if what it rests on has changed."""
        message = wire.ApplyPlanRequest(request_id=request_id(request), name=plan, allow_partial=allow_partial)
        answer: wire.ApplyPlanResponse = await self._calls.unary(self._calls.admin.ApplyPlan, message)
        return answer.plan

    async def reassign(
        self,
        sources: Sequence[wire.ReassignmentSource],
        targets: Sequence[wire.ReassignmentTarget],
        *,
        timeout_s: float | None = None,
        note: str = "",
        request: str | None = None,
    ) -> wire.Reassignment:
        """Moves replicas: all sources are released and confirmed before any target is granted, or all rolls back."""
        message = wire.ReassignRequest(request_id=request_id(request), sources=sources, targets=targets, note=note)
        if timeout_s is not None:
            message.timeout.CopyFrom(wire.duration(timeout_s))
        answer: wire.ReassignResponse = await self._calls.unary(self._calls.admin.Reassign, message)
        return answer.reassignment

    async def preempt(
        self, trajectories: Sequence[str], *, note: str = "", request: str | None = None
    ) -> tuple[str, ...]:
        """Stops trajectories; they keep their tokens and queue again. Returns the command for each, "" if none."""
        message = wire.PreemptRequest(request_id=request_id(request), trajectories=trajectories, note=note)
        answer: wire.PreemptResponse = await self._calls.unary(self._calls.admin.Preempt, message)
        return tuple(answer.commands)

    async def pause_run(self, run: str, *, note: str = "", request: str | None = None) -> wire.Run:
        """Stops a run; its work is preempted and kept."""
        message = wire.PauseRunRequest(request_id=request_id(request), name=run_name(run), note=note)
        answer: wire.PauseRunResponse = await self._calls.unary(self._calls.admin.PauseRun, message)
        return answer.run

    async def resume_run(self, run: str, *, note: str = "", request: str | None = None) -> wire.Run:
        """Lets a paused run go on."""
        message = wire.ResumeRunRequest(request_id=request_id(request), name=run_name(run), note=note)
        answer: wire.ResumeRunResponse = await self._calls.unary(self._calls.admin.ResumeRun, message)
        return answer.run


def run_name(run: str) -> str:
    """runs/{run} from an id; full names (of a run or a group) stay."""
    return run if run.startswith("runs/") else f"runs/{run}"


def as_task(task: wire.Task | Mapping[str, Any]) -> wire.Task:
    """A Task message; a mapping becomes its JSON content."""
    if isinstance(task, wire.Task):
        return task
    return wire.Task(id=str(task.get("id", ""))[:128], json=json.dumps(task, separators=(",", ":")))


def _view(full: bool) -> "wire.TrajectoryView.ValueType":
    return wire.TRAJECTORY_VIEW_FULL if full else wire.TRAJECTORY_VIEW_BASIC

"""PlacementService: in the contract, not implemented yet; docs/limits.md says so."""

from collections.abc import Awaitable, Callable
from typing import Any

from services.common import errors, wire
from services.common.rpc.server import Context


def _refuse(method: str) -> Callable[..., Awaitable[Any]]:
    async def call(_self: object, _request: wire.Message, _context: Context) -> Any:
        raise errors.unimplemented(f"PlacementService.{method}")

    return call


class PlacementService(wire.PlacementServiceServicer):
    """Every method answers UNIMPLEMENTED with a pointer to where the missing ones are listed."""

    RouteTurn = _refuse("RouteTurn")
    ReportTurn = _refuse("ReportTurn")
    FinishTrajectory = _refuse("FinishTrajectory")
    JoinFleet = _refuse("JoinFleet")
    AwaitHandover = _refuse("AwaitHandover")
    AnswerHandover = _refuse("AnswerHandover")
    LeaveFleet = _refuse("LeaveFleet")

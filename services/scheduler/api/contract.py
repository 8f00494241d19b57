"""Names of the scheduler's services and how they are added to a server."""

from collections.abc import Sequence
from typing import Any

from services.common import wire
from services.common.rpc import requests
from services.common.rpc.server import AddServicer

NAMES = (
    "libra.v1.FleetService",
    "libra.v1.TrajectoryService",
    "libra.v1.PlacementService",
    "libra.v1.AdminService",
)


CHECKED_BY_PARTS = "/libra.v1.FleetService/Report"
"""Its parts are checked one by one: what is wrong with one must not keep the others from being registered."""


def check(method: str, request: wire.Message) -> None:
    """INVALID_FIELD if the request carries what no method takes (common/rpc/requests.py)."""
    if method != CHECKED_BY_PARTS:
        requests.check(request)


def add_to_server(
    fleet: wire.FleetServiceServicer,
    trajectories: wire.TrajectoryServiceServicer,
    admin: wire.AdminServiceServicer,
    placement: wire.PlacementServiceServicer,
) -> Sequence[tuple[AddServicer, Any]]:
    """The pairs that `serve` takes."""
    return (
        (wire.add_FleetServiceServicer_to_server, fleet),
        (wire.add_TrajectoryServiceServicer_to_server, trajectories),
        (wire.add_AdminServiceServicer_to_server, admin),
        (wire.add_PlacementServiceServicer_to_server, placement),
    )

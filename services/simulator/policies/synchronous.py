"""Synchronous policies on shared accelerators: plain colocated, and tail batching."""

from services.simulator.layout import Mode
from services.simulator.policies.base import Policy


class Colocated(Policy):
    """All accelerators generate a batch, then all train on it (verl's default), least-loaded routing."""

    name = "colocated"
    mode = Mode.COLOCATED


class TailBatching(Policy):
    """Rounds with a quarter more prompts than a step takes; the last to end are aborted and generated again in rounds
    of their own, where long ones wait for long ones only (after RollPacker, which also launches more responses for each
    prompt; here only more prompts).
    """

    name = "tail-batching"
    mode = Mode.COLOCATED
    overprovision = 1.25

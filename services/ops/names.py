"""Names as people type them."""

import re

ACCELERATOR = re.compile(r"([A-Za-z0-9._-]+)/(\d{1,4})")


def full_name(name: str) -> str:
    """A full resource name: n0/2 names an accelerator; full names stay."""
    match = ACCELERATOR.fullmatch(name)
    if match and match[1] not in ("runs", "workers", "replicas", "plans", "commands", "nodes", "reassignments"):
        return f"nodes/{match[1]}/accelerators/{match[2]}"
    return name

"""Scheduling policies, ours and published ones, behind the interface of `base`."""

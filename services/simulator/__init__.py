"""Discrete-event simulation over the decision core (not part of this version)."""

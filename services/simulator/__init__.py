"""Discrete-event simulation and trace replay over `scheduler.core`: the same deciding code, a virtual clock.

`times` is what a simulated device takes (a protocol); `hardware` computes it from profiles. `workload` is what is to be
done, `engine` one rollout engine, `cluster` all of them with tools, trainers and the clock; `policies` decide.
"""

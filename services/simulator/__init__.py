"""Discrete-event simulation and trace replay over `scheduler.core`: the same deciding code, a virtual clock.

`times` is what a simulated device takes (a protocol). `hardware` has what times are computed from, `profiles` reads it
from files, `steptimes` and `trainingtimes` compute; `calibrate` fits the constants, `anchors` compares with what is
published.
`workload` is what is to be done, `engine` one rollout engine, `cluster` all of them with tools, trainers and the clock;
`policies` decide.
"""

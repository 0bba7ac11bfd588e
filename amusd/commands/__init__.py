"""The work of each `amusd COMMAND`, once `launch/` has settled configuration and processes.

`run` is the target's process of `generate` and `compare`; the others need no pair of workers, or start their own.
"""

"""What `amusd COMMAND` does, a module or a package for each, once `launch/` has settled configuration and processes.

`run` is the target's process of `generate` and `compare`; the others need no pair of workers, or start their own.
"""

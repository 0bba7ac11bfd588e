"""The work of each `amusd COMMAND`: `run` in the module of its name, which gets a `Job`, or a folder.

`launch/commands.py` lists them.
"""

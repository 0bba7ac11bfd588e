"""Everything between a command line and the work of a command; installed as `amusd_launch`.

The only place that knows Hydra, torchrun's variables and run directories. `amusd` never imports it.
"""

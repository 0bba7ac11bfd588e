"""Everything between a command line and the work of a command; installed as `amusd_launch`.

The only place that uses Hydra and torchrun's variables and makes run directories. `amusd` never imports it.
"""

"""Everything between a command line and the two worker processes; installed as `amusd_launch`.

The only place that knows Hydra, reads environment variables, or starts and ends processes. `amusd` never imports it.
"""

"""Schedules: when to verify, and how many candidates. Pure: the caller gives what has arrived, and all times."""

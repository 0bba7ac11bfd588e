"""Schedules: when to verify and how many. Pure functions of what a session shows and of measured times."""

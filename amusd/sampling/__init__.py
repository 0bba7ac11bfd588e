"""Acceptance rules and stopping: pure functions."""

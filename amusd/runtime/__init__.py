"""The two workers, the rollback between them, and their start and end."""

"""The real sessions and policies on a virtual clock, to predict speed-ups. Standard library only."""

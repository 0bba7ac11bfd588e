"""The real workers on virtual time, with models that only cost time, to predict speed-ups."""

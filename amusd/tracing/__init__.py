"""Events of a run and the figures computed from them."""

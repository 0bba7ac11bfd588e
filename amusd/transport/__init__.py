"""Links between processes: target and draft, and the ranks of a target."""

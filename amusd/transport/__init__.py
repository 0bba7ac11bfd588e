"""Links between the two workers."""

"""Drafters: the objects that propose candidates."""

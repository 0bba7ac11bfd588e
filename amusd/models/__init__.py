"""Models behind one narrow interface, with caches that can be cut back."""

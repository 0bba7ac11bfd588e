"""Drafts of this package inside other engines."""

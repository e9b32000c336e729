"""Changing the layout, or the owners, while requests run."""

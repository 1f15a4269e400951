"""Lowerings: one small function for each ATen operation, from its arguments to index notation."""

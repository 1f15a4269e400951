"""Rewrites of a single kernel, before it is scheduled."""

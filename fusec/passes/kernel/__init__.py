"""Rewrites of one kernel, before it is scheduled."""

"""Schedules: how each axis of a kernel runs on a target (grid, loop or lanes)."""

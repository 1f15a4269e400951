"""Aliasing of inputs, results and saved values, as in eager."""

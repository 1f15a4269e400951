"""Rewrites of FX graphs, before they become index notation."""

"""Rewrites of FX graphs, before they are lowered to index notation."""

"""Rewrites of graphs: definitions in index notation, before fusion."""

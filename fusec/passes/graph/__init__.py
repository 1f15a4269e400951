"""Rewrites of graphs: definitions in index notation, before any of them share a kernel."""

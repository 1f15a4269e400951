"""The cache of compiled graphs, in memory and on disk."""

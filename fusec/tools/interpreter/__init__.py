"""Reference interpreters of graphs, expressions and programs, in NumPy."""

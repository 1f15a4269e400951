"""Reference interpreters: what graphs, expressions and programs mean, in NumPy."""

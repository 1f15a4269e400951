"""The host's side of a compiled graph: allocate, launch, free; in Python and in C++."""

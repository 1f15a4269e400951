"""A compiled graph's call: what binds it, and what stands around it."""

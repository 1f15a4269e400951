"""``fusec.load``: a model of one file, called without the compiler."""

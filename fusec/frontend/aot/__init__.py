"""What AOTAutograd traces: decompositions, refusals, strides, and the key of a graph."""

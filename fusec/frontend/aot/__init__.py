"""Control of AOTAutograd's tracing: decompositions, refusals, strides, and the key of a graph."""

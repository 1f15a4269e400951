"""From a kernel and its plan to source text: lowering, printers, and the graph's wrapper."""

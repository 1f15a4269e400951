"""Passes: graph to graph, graph to kernels, kernel to plan. They decide; code generation prints."""

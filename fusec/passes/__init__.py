"""Graph to graph, graph to kernels, kernel to plan: all that decides, nothing that prints."""

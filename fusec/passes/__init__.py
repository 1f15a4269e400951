"""Graph to graph, graph to kernels, kernel to plan: everything that decides, nothing that prints."""

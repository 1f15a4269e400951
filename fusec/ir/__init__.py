"""The index-notation IR: dtypes, indices, scalar expressions, graphs, kernels, programs.

Imports nothing but ``fusec.errors``.
"""

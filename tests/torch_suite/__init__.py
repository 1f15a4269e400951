"""PyTorch's own compiler tests, from a checkout that a user has; see ``__main__.py``."""

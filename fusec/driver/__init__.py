"""The driver: from torch.compile's call to a bound, compiled graph."""

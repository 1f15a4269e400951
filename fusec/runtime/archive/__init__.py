"""Archives: compiled graphs read from bytes."""

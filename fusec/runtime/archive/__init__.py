"""Archives: models and compiled graphs read from files."""

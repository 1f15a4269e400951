"""What a compiled graph needs while it runs: cache, loaders, launchers; no compiler."""

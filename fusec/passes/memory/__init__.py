"""Where buffers lie: lifetimes, the static arena, and results written in place."""

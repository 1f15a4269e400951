"""Memory of buffers: liveness, reuse, the static arena, and results written in place."""

"""What explains, draws, bisects, emulates and checks: tools over the compiler, which never imports
them."""

"""Tools on top of the compiler (explain, draw, bisect, emulate, check); it never imports them."""

"""Which definitions share a kernel, and which calls stay the library's."""

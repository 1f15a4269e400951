"""From an ``fx.GraphModule`` of functional ATen to a ``Graph`` of index notation."""

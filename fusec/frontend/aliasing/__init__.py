"""Memory that inputs, results and saved values share, as eager has it."""

"""The optimizers: maths and state, with no process and no stream of their own."""

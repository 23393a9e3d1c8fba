"""Can the gate be fooled: one miniature suite, or one altered piece of evidence, for each way to be green wrongly."""

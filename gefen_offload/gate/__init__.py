"""May it ship: facts, record, verdict."""

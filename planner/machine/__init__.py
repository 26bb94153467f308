"""What was measured of a machine, or is assumed of it: profile, budgets, engine builds, capabilities."""

"""The vocabulary of atsplan and its solver: inventory, units, profile, problem, plan."""

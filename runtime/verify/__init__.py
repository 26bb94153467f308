"""Whether what was loaded lies where the plan says, and computes the same."""

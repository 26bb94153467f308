"""The steps from a request to a recorded plan, in order."""

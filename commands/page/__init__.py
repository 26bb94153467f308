"""A plan, a sweep or a measurement as one file for a browser."""

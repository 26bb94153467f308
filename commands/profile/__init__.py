"""A machine measured, or its profile made from results that were measured before."""

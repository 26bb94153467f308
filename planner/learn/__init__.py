"""What was measured of a plan, cleaned and put into the calibration, and whether another plan is worth it."""

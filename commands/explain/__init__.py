"""What a plan is limited by, in words and as a picture."""

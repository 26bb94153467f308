"""A plan raced against stock rules at equal measured memory."""

"""What this program keeps between runs in the user's cache folder, and how far it trusts that."""

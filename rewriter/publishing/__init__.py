"""Finished files to their names, all or none: a journal, and what a killed run left put right."""

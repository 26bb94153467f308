"""Runs of whole models that fit what operators alone do not show."""

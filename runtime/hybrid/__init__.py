"""Hybrid experts: a device that keeps some experts of every layer in VRAM and computes the rest beside it."""

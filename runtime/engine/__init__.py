"""The engine's libraries: found, declared, probed, and listened to."""

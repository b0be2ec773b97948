"""Authenticated connections over TCP: nothing here knows of ranks."""

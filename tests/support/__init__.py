"""Modules that several folders of tests use."""

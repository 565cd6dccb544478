"""Asynchrony."""

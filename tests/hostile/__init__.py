"""Hostile calls of every command."""

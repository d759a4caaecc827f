"""Engines: who generates the completions of a population."""

"""Races: candidates timed on this machine, and the verdicts that are kept."""

"""Grading: the agent's diff, filtered, in a clean sandbox against the task's hidden tests."""

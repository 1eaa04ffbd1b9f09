"""The demo: a task pool, a tiny policy, a run that improves it, and the curve."""

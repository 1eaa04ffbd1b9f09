"""Tasks: Harbor directories, the thin index over them, their registration, and the demo's task pool."""

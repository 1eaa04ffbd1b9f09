"""Trials: an unmodified harness works on a task in a sandbox; its diff is graded in a second, clean one."""

"""What every stage runs on: one pure `step`, a transactional loop, dead letters, metrics."""

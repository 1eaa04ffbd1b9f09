"""The learner's mathematics: pure torch, no I/O, no clock.

Shape suffixes used throughout the learner: B rows of a micro-batch (one row = one segment), T token positions,
L mixture-of-experts layers, K experts per token, S sequences (one sequence = one trial, all its segments),
N trained tokens of a micro-batch in row-major order, V vocabulary.
"""

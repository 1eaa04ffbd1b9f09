"""The run again, from the log alone: what was derived is derived again and compared byte for byte."""

"""Adapters: how each coding harness is started, told its task and asked how it ended."""

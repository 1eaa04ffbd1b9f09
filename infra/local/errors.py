"""What goes wrong when the local stack is started. Every message names the cause and the remedy."""

from __future__ import annotations


class StackError(RuntimeError):
    """The local stack cannot be started, used or stopped."""


class PortInUseError(StackError):
    """Another process listens on a port the stack needs."""


class DataDirectoryOwnedError(StackError):
    """Another process owns the data directory."""


class JavaNotFoundError(StackError):
    """No Java runtime that is new enough."""


class DownloadError(StackError):
    """An artifact could not be fetched or does not have the locked checksum."""

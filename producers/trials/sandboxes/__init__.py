"""Sandboxes: bubblewrap outside, one set of namespaces per trial inside."""

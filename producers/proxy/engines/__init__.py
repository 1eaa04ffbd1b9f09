"""Inference engines behind one interface: torch (in process), scripted (tests), vLLM (a running server)."""

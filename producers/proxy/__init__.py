"""The capture proxy: an OpenAI-compatible endpoint that records every model call token by token."""

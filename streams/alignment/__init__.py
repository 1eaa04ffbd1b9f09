"""Alignment: which recorded tokens a request continues, and how calls become token segments. Pure."""

from streams.alignment.history import KnownConversation, Match, match_history, message_digests

__all__ = ["KnownConversation", "Match", "match_history", "message_digests"]

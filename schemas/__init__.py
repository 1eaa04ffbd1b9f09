"""The event schemas: the one interface that every service shares."""

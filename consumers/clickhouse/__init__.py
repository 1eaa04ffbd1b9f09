"""ClickHouse: the embedded engine's owner, the schema, the sink, and the queries people ask."""

"""The local stack: a Kafka broker and an embedded ClickHouse engine as ordinary processes, without containers."""

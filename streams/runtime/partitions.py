"""Which partition a key belongs to: the hash that Java, aiokafka and librdkafka's murmur2_random agree on."""

from __future__ import annotations


def murmur2(data: bytes) -> int:
    """Kafka's key hash (org.apache.kafka.common.utils.Utils.murmur2), made positive."""
    mask = 0xFFFFFFFF
    h = (0x9747B28C ^ len(data)) & mask
    whole = len(data) & ~3
    for i in range(0, whole, 4):
        k = int.from_bytes(data[i : i + 4], "little") * 0x5BD1E995 & mask
        k = (k ^ k >> 24) * 0x5BD1E995 & mask
        h = h * 0x5BD1E995 & mask ^ k
    if len(data) > whole:
        h = (h ^ int.from_bytes(data[whole:], "little")) * 0x5BD1E995 & mask
    h = (h ^ h >> 13) * 0x5BD1E995 & mask
    return (h ^ h >> 15) & 0x7FFFFFFF


def partition_of(key: bytes, num_partitions: int) -> int:
    """The partition of a record with this key."""
    return murmur2(key) % num_partitions

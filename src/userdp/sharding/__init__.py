"""Models that are divided over the ranks with FSDP2 (`fully_shard`): docs/sharding.md."""

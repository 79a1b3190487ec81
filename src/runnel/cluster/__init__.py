"""Which node serves which shard, where several nodes share one set of topics. Read `state.py` first."""

__all__ = ["state"]

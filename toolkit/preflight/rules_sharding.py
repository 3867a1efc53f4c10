"""Rules about sharding."""

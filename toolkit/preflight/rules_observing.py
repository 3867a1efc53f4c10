"""Rules about observing."""

"""Rules about attention."""

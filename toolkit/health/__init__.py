"""Health of a run: nonfinite values and spikes, stragglers, and the heartbeat."""

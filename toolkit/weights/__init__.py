"""Read, write and convert weight formats."""

"""Fine-tuning: adapters, and selection of the trained parameters."""

"""Fine-tuning: adapters, and selection of trained parameters."""

"""Fine-tuning: adapters that are added to a model, and the choice of what is trained."""

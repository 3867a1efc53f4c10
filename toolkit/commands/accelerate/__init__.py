"""The settings of accelerate and Trainer, and their equivalents in this toolkit."""

"""The settings of accelerate and Trainer, and what they mean here."""

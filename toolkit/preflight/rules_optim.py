"""Rules about optim."""

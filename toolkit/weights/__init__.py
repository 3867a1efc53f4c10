"""Reading, writing and conversion of weight formats."""

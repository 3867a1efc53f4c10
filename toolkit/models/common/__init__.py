"""Parts of models that families share: attention and its back ends, rotary positions, the output head."""

"""Parts that families share: the decoder, its shapes and initial values, its form at Hugging Face."""

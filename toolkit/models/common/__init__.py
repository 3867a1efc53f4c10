"""Code shared by all families: the decoder, its shapes and initial values, and its Hugging Face format."""

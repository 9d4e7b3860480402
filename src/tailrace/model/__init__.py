"""Find, convert and cache a model; its tokenizer and chat template."""

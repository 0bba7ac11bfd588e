"""Checkpoints: their files, configurations, tokenizers and published layouts, and the models that are made of them."""

"""Self-instruction (SeRL, arXiv 2505.20347): a model writes problems, from seeds and from its own, that it then trains on."""

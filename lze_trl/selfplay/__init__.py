"""Self-instruction (SeRL, arXiv 2505.20347): a model writes the problems that it is trained on."""

"""Evaluation of models on tasks, scored by the training reward. What it offers is in the modules; this one imports nothing."""

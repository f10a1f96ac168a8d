"""The pass rate of every prompt, from completions that are drawn once, for every training after it."""

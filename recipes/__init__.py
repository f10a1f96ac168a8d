"""Recipes, and the commands that make the models and data that some of them start from. Not in the wheel."""

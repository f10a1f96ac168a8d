"""Speed of the parts, each against TRL where TRL has it: `python -m benchmarks.parts`."""

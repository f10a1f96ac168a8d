"""TRL's own tests of GRPO, run with its trainer and with ours: `make test-trl-own TRL_SOURCE=DIR`."""

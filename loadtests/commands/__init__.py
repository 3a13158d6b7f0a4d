"""The subcommands of `twostroke loadtest`, a module each: `add_arguments(parser)` and `run(arguments) -> int`."""

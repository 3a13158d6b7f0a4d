"""The subcommands of `twostroke`: each module has `add_arguments(parser)` and `run(arguments) -> exit code`."""

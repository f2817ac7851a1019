"""The subcommands, each in a module of its own."""

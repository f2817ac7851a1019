"""What a user gave: arguments, their names and values, and the files they point to."""

from llamafactory_preflight.arguments.reading import CONFIG_SUFFIXES, names, overridden, read, with_overrides


__all__ = ["CONFIG_SUFFIXES", "names", "overridden", "read", "with_overrides"]

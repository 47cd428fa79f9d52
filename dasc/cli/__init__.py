"""The ``dasc`` command; :mod:`dasc.cli.main` is its entry point."""

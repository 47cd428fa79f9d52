"""``python -m dasc`` is the ``dasc`` command."""

from dasc.cli.main import main

if __name__ == "__main__":
    main()

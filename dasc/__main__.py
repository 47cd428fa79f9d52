"""``python -m dasc`` is the ``dasc`` command."""

from dasc.cli import main

if __name__ == "__main__":
    main()

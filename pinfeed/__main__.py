"""The ``pinfeed`` command, run as ``python -m pinfeed``."""

from pinfeed.cli.main import main

if __name__ == "__main__":
    main()

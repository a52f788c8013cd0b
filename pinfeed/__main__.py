"""``python -m pinfeed``: the command."""

from pinfeed.cli.main import main

if __name__ == "__main__":
    main(prog_name="pinfeed")

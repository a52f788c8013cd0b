"""``python -m pinfeed``: the command."""

from .cli.command import main

if __name__ == "__main__":
    main(prog_name="pinfeed")

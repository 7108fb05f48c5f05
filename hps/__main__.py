"""`python -m hps` is the command `hps`."""

from hps.tools.cli.app import main

if __name__ == "__main__":
    main()

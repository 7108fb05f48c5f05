"""`python -m hps` is the command `hps`."""

from hps.cli.app import main

if __name__ == "__main__":
    main()

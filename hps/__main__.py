"""`python -m hps` is the command `hps`."""

from hps.cli import main

if __name__ == "__main__":
    main()

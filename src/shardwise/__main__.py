"""`python -m shardwise` is the `shardwise` command."""

from shardwise.cli.start import main

if __name__ == "__main__":
    main()

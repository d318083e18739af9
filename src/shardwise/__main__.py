"""`python -m shardwise` is the `shardwise` command."""

import os
import sys

# As the command itself, it imports nothing from the folder that it is started in.
if not sys.flags.safe_path and sys.path[:1] == [os.getcwd()]:
    del sys.path[0]

from shardwise.cli.start import main

if __name__ == "__main__":
    main()

"""The command line: `python -m zerosharder COMMAND`."""

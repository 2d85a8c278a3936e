"""The engine: units and their states, collectives, the tape of a pass, and the walk back through it."""

"""Where a tier's bytes live: pools of fixed-size slots with a table of headers, in memory and on disk."""

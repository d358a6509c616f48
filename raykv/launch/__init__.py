"""Launching: a cluster from its spec, or one engine by hand. What `raykv up`, `down`, `drain` and `serve` do."""

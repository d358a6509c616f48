"""What does: plain classes that Ray runs, and the one edge to Ray."""

"""One offline checker for each promise: each reads a run's archive and returns its numbers and what it found broken."""

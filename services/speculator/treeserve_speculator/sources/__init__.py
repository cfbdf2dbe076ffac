"""Draft sources: each guesses how a sequence goes on, in its own way, as a token tree."""

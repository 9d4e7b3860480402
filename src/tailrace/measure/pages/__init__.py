"""One file without network that shows what a run said: curves, figures, HTML."""

"""From the start of a server to its first token."""

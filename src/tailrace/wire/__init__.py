"""Bytes to `Request`, tokens to chunks. Pure: no I/O, no clock."""

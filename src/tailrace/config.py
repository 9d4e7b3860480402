"""The mechanism of configuration: one TOML file whose tables are folders, strict, with the origin of every value.

The sections themselves are frozen Structs beside the code they configure; this file knows none of them.
"""

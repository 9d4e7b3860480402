"""One file a verb: decode the sections, build the objects, call, print."""

"""One sender process: each request at its instant, one record a request. The hot path of a measurement."""

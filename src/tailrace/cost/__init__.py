"""Pure cost models: what a model's shape costs in bytes and a step in time, each with its formula."""

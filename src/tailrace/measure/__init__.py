"""What a latency, a rate and a claim mean: one definition for the load generator, the gateway and the simulator."""

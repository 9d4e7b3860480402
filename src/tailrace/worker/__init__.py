"""One engine as a service, two processes: the app keeps the client's socket, the engine child runs the steps."""

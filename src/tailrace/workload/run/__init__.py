"""One measured run: ask the endpoint, calibrate the client, start the senders, write the rows."""

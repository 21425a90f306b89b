"""Model servers: how they are started, what their log and metrics state, and a client."""

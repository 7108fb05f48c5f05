"""The engine process: the batches of all frontends, and the application that administers models."""

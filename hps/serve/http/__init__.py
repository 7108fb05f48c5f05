"""What the engine and the frontends have in common of HTTP: answers, authorization, metrics, limits."""

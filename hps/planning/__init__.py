"""What a configuration will need and do, before anything is loaded: memory by tier, and hit rates by the size of the cache."""

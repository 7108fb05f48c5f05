"""The contracts of the product's parts, as tests that an implementation's own tests subclass. They need pytest and Hypothesis.

| part | contract |
|---|---|
| a database | `hps.testing.databases.DatabaseContract`, and those of its capabilities |
| an embedding cache | `hps.testing.caches.CacheContract` |
| a file system | `hps.testing.filesystems.FileSystemContract` |
| a format of `hps import` | `hps.testing.sources.ArraySourceContract` |
| an engine for networks | `hps.testing.networks.NetworkContract` |
| a log of updates | `hps.testing.update_logs.UpdateLogContract` |

docs/extending.md shows how a package of its own uses them.
"""

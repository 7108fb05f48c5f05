"""The life of every version of every model: one state machine, the changes that drive it, and the deployments it holds."""

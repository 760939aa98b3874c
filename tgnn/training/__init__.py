"""Training a model over ranks: configuration, losses and metrics, the loop, inference, checkpoints, run
directories.
"""

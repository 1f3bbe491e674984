"""Tensor parallelism: layers are split among ranks, which compute a part of each."""

"""`prepare`, `fit` and `log`: a training cell's session and its checkpoints."""

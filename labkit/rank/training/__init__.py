"""`prepare`, `fit` and `log`: a training cell's session, its optimizer and its
checkpoints.
"""

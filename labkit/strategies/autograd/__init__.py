"""Between a loop and torch.autograd: forward and backward passes, gradients, and what
ranks do alike in them.
"""
